// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/local_ranks.h"

#include <fcntl.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/launch/processes/affinity.h"
#include "lockstep/launch/recovery_memory.h"

namespace lockstep::launch {
namespace {

// By itself: 75 may be the answer to our own SIGTERM.
bool says_why_not_to_restart(const ExitStatus& status) {
  return status.signal == 0 && status.code != 75 && !restart_may_help(status.code);
}

std::string dump_folder(const LaunchOptions& options, int attempt) {
  const std::string& folder = options.flight_dir.empty() ? options.log_dir : options.flight_dir;
  return folder.empty() ? "" : format("{}/attempt_{}", folder, attempt);
}

// Without a handler of its own, a signal that is passed on would end the program.
bool catches(pid_t process, int signal) {
  std::ifstream status(format("/proc/{}/status", process));
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("SigCgt:"))
      return (std::stoull(line.substr(7), nullptr, 16) >> (signal - 1) & 1) != 0;
  }
  return false;
}

// After SIGKILL: what is still there then is stuck in the kernel and cannot be waited for.
constexpr milliseconds kGiveUp{1'800};
// How long output pipes may stay open after all ranks are gone (something left its process group).
constexpr milliseconds kDrainTime{500};
constexpr milliseconds kStoppedPatience{1'000};
constexpr milliseconds kLeaveTogether{5'000};
constexpr milliseconds kAskAgain{1'000};
// In which ranks that cannot be stopped yet are taken to load.
constexpr milliseconds kLoading{15'000};
constexpr int kNotStarted = 127;
// The longest that ranks that show life may take for their last step and for saving.
constexpr std::chrono::minutes kLongestStop{30};

struct Pipe {
  Fd reader, writer;
};

Pipe make_pipe() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw SystemError("pipe", errno);
  fcntl(ends[0], F_SETFL, O_NONBLOCK);  // our end only: the rank's writes block as usual
  return {Fd(ends[0]), Fd(ends[1])};
}

}  // namespace

LocalRanks::LocalRanks(const Surroundings& around, World world)
    : around_(around),
      world_(std::move(world)),
      start_(Clock::now()),
      watch_(world_.first_rank, world_.ranks(), dump_folder(around.options, attempt()),
             around.options.max_restarts > 0, around.console),
      output_(around.poller, around.console),
      resize_at_(world_.grows_at),
      next_look_(start_) {
  around_.poller.watch(around_.signals.fd(), EPOLLIN, [this] { on_signal(); });
  around_.poller.watch(around_.link.news_fd(), EPOLLIN, [this] { on_news(); });
}

LocalRanks::~LocalRanks() {
  around_.poller.forget(around_.signals.fd());
  around_.poller.forget(around_.link.news_fd());
  signal_all(SIGKILL);
  for (const Worker& worker : workers_) {
    if (!worker.process || worker.process->pid() < 0) continue;
    around_.poller.forget(worker.process->pidfd());
    around_.guard.forget(worker.process->pid());
  }
}

Outcome LocalRanks::run() {
  start_all();
  while (!over()) {
    around_.poller.wait(until_next_act());
    act_on_time();
  }
  const bool left_behind = leave_behind();
  drain(left_behind ? milliseconds{0} : kDrainTime);
  watch_.finish();
  return outcome();
}

// ---- start ----

void LocalRanks::start_all() {
  const std::vector<int> cores = allowed_cores();
  workers_.reserve(world_.places.size());  // handlers keep references
  for (int local_rank = 0; local_rank < world_.ranks() && !failure_; ++local_rank) {
    start(local_rank,
          user_set_threads() ? std::vector<int>() : core_share(cores, local_rank, world_.ranks()));
  }
  if (failure_) {
    around_.link.tell_end(*failure_);
    end_soon(milliseconds{0}, around_.options.grace);
  }
}

void LocalRanks::start(int local_rank, const std::vector<int>& cores) {
  const LaunchOptions& options = around_.options;
  const int rank = world_.first_rank + local_rank;
  const bool bare = options.bare_rank_0 && rank == 0;
  Pipe out = make_pipe(), err = make_pipe();
  Command command{.argv = options.command,
                  .environment = rank_variables(options, around_.facts, world_, local_rank,
                                                world_.generation, watch_.descriptor(local_rank)),
                  .out = bare ? STDOUT_FILENO : out.writer.get(),
                  .err = bare ? STDERR_FILENO : err.writer.get(),
                  .keep = {around_.facts.token_fd},
                  .guard = around_.guard.announcements(),
                  .cores = cores};
  for (const int fd : {watch_.descriptor(local_rank), around_.facts.recovery_fd}) {
    if (fd >= 0) command.keep.push_back(fd);
  }
  // One reader at most: rank 0, unless that would take a terminal away from the user.
  if (rank == 0 && isatty(STDIN_FILENO) == 0) command.in = STDIN_FILENO;
  if (rank == options.hang_rank) command.hang_rank = rank;

  Worker& worker = workers_.emplace_back(Worker{rank, std::nullopt, std::nullopt});
  try {
    start_process(worker, command);
  } catch (const SystemError& failure) {
    failure_ = Outcome{Outcome::Kind::failed, kNotStarted, false,
                       format("rank {}: {}", rank, failure.what())};
    return;
  }
  watch_.started(local_rank, worker.process->pid());
  around_.poller.watch(worker.process->pidfd(), EPOLLIN,
                       [this, &worker] { on_worker_end(worker); });
  if (bare) return;
  add_log(std::move(out.reader), rank, Console::Stream::out);
  add_log(std::move(err.reader), rank, Console::Stream::err);
}

// A server that was killed does not end the job.
void LocalRanks::start_process(Worker& worker, const Command& command) const {
  if (around_.forks != nullptr) {
    try {
      worker.process.emplace(around_.forks->start(command));
      return;
    } catch (const Error& failure) {
      around_.console.message(
          format("rank {} loads its program itself: {}", worker.rank, failure.what()));
    }
  }
  worker.process.emplace(command);
}

// ---- output ----

void LocalRanks::add_log(Fd pipe, int rank, Console::Stream stream) {
  const std::string& dir = around_.options.log_dir;
  Fd file;
  try {
    if (!dir.empty()) file = open_log(dir, attempt(), rank, stream);
  } catch (const ConfigError& failure) {
    // The first attempt's files were opened before anything ran; a later one continues without.
    around_.console.message(failure.what());
  }
  output_.add(std::move(pipe), rank, stream, std::move(file));
}

// ---- events ----

void LocalRanks::on_signal() {
  while (const auto signal = around_.signals.take()) {
    if (*signal == SIGCHLD) {
      on_child();
      continue;
    }
    if (*signal == SIGUSR2) watch_.dump_soon();
    if (!around_.signals.asks_to_stop(*signal)) {
      for (const Worker& worker : workers_) {
        if (worker.process && !worker.status && catches(worker.process->pid(), *signal))
          worker.process->signal_group(*signal);
      }
      continue;
    }
    if (stop_count_ == 0) around_.link.tell_stop(*signal);
    stop(*signal);
  }
}

void LocalRanks::on_child() {
  for (size_t i = 0; i < workers_.size(); ++i) {
    const Worker& worker = workers_[i];
    if (!worker.process || worker.status) continue;
    if (const auto signal = worker.process->take_stop())
      watch_.on_stop(static_cast<int>(i), *signal);
  }
}

void LocalRanks::look_after() {
  if (Clock::now() < next_look_) return;
  next_look_ = Clock::now() + RankWatch::kInterval;
  on_child();  // of several at one time there may be one signal
  watch_.look();
  if (resize_at_ && *resize_at_ <= Clock::now()) ask_to_resize();
  if (stop_signal_ != 0 || (resizes() && hard_end_ && !failure_)) {
    if (stop_signal_ != 0) pass_stop_on();
    if (around_.options.ranks_save && stop_count_ <= 1 && !give_up_at_ && watch_.has_moved())
      kill_at_ = std::min(*hard_end_, Clock::now() + std::max(around_.options.stop_grace,
                                                              3 * watch_.longest_step()));
    return;
  }
  const auto late = watch_.to_replace();
  if (!late || failure_) return;
  Worker& worker = workers_[static_cast<size_t>(*late)];
  worker.why_killed = "was stopped for too long, and killed to be replaced";
  worker.process->signal_group(SIGKILL);
}

void LocalRanks::on_news() {
  const NodeLink::News news = around_.link.take_news();
  if (news.stop && stop_count_ == 0) stop(*news.stop);
  if (news.resize) {
    resize_told_ = true;
    resize_at_ = Clock::now();
  }
  if (!news.end) return;
  global_end_ = news.end;
  if (global_end_->kind == Outcome::Kind::failed) {
    end_soon(around_.options.grace, 2 * around_.options.grace);
  }
}

// The first signal is a request, the second urges, the third does not ask.
void LocalRanks::stop(int signal) {
  if (++stop_count_ == 1) {
    stop_signal_ = signal;
    pass_stop_on();
    watch_.has_moved();
    hard_end_ = Clock::now() + kLongestStop;
    kill_at_ = std::min(kill_at_.value_or(Clock::time_point::max()),
                        Clock::now() + around_.options.stop_grace);
  } else if (stop_count_ == 2) {
    end_soon(milliseconds{0}, around_.options.grace);
  } else {
    end_soon(milliseconds{0}, milliseconds{0});
  }
}

// Ranks that save get the signal when they can: one that is still loading would only end, and the
// copies of its state in memory with it.
void LocalRanks::pass_stop_on() {
  for (size_t i = 0; i < workers_.size(); ++i) {
    Worker& worker = workers_[i];
    if (!worker.process || worker.status || worker.told_to_stop) continue;
    const bool loads = around_.options.ranks_save
                           ? !watch_.is_ready(static_cast<int>(i))
                           : holds_copies(around_.facts.recovery_fd) &&
                                 Clock::now() - start_ < kLoading &&
                                 !catches(worker.process->pid(), stop_signal_);
    if (loads) continue;
    worker.told_to_stop = true;
    sent_.insert(stop_signal_);
    worker.process->signal_group(stop_signal_);
    if (watch_.is_stopped(static_cast<int>(i))) worker.process->signal_group(SIGCONT);
  }
}

// They stop at a step boundary, all at the same, and leave with 75. Nothing is done to ranks that
// do not, unless some have.
void LocalRanks::ask_to_resize() {
  resize_at_.reset();
  if (resizing_ || stop_signal_ != 0 || failure_ || global_end_ || term_at_) return;
  for (size_t i = 0; i < workers_.size(); ++i) {
    const Worker& worker = workers_[i];
    if (!worker.process || worker.status) return;
    const bool ready = !around_.options.ranks_save || watch_.is_ready(static_cast<int>(i));
    if (ready && catches(worker.process->pid(), SIGTERM)) continue;
    resize_at_ = Clock::now() + kAskAgain;
    return;
  }
  resizing_ = true;
  for (const Worker& worker : workers_)
    sigqueue(worker.process->pid(), SIGTERM, sigval{.sival_int = kStopToResize});
}

void LocalRanks::on_worker_end(Worker& worker) {
  worker.status = worker.process->status();
  if (!worker.status) return;
  around_.poller.forget(worker.process->pidfd());
  const int signal = worker.status->signal;
  worker.by_itself = signal != 0 && signal != SIGABRT && !sent_.contains(signal);
  watch_.on_end(static_cast<int>(&worker - workers_.data()), worker.status->text());
  // 75 means "saved and left", not a failure, if all do it. The request may have come to ranks of
  // another node, or to one rank alone.
  const bool left = worker.status->code == kSaved && worker.status->signal == 0;
  if (left && resizes() && stop_signal_ == 0 && !hard_end_) {
    watch_.has_moved();
    hard_end_ = Clock::now() + kLongestStop;
    kill_at_ = std::min(kill_at_.value_or(Clock::time_point::max()),
                        Clock::now() + around_.options.stop_grace);
  }
  if (left && stop_signal_ == 0 && !resizes() && !explain_75_)
    explain_75_ = Clock::now() + std::max(around_.options.grace, kLeaveTogether);
  if (!worker.status->good() && !left) {
    around_.link.mark_lost(worker.rank, worker.status->text());
    if (!failure_) {
      failure_ = local_failure(worker);
      around_.link.tell_end(*failure_);
    } else if (failure_->restartable && says_why_not_to_restart(*worker.status)) {
      failure_ = local_failure(worker);  // a peer that it left behind was seen to end before it
    }
    end_soon(around_.options.grace, 2 * around_.options.grace);
  }
  if (all_ended() && !failure_ && !std::exchange(told_done_, true)) around_.link.tell_done();
}

// ---- ending ----

void LocalRanks::end_soon(milliseconds until_term, milliseconds until_kill) {
  const auto now = Clock::now();
  term_at_ = std::min(term_at_.value_or(Clock::time_point::max()), now + until_term);
  kill_at_ = std::min(kill_at_.value_or(Clock::time_point::max()), now + until_kill);
  act_on_time();
}

void LocalRanks::act_on_time() {
  const auto now = Clock::now();
  look_after();
  if (explain_75_ && *explain_75_ <= now && stop_signal_ == 0 && !failure_ && !all_ended()) {
    const auto alone = std::find_if(workers_.begin(), workers_.end(), [](const Worker& worker) {
      return worker.status && worker.status->code == kSaved;
    });
    failure_ = local_failure(*alone);
    around_.link.tell_end(*failure_);
    term_at_ = now;
    kill_at_ = now + around_.options.grace;
  }
  if (term_at_ && *term_at_ <= now) {
    term_at_ = Clock::time_point::max();  // once
    signal_all(SIGTERM);
  }
  if (kill_at_ && *kill_at_ <= now && !give_up_at_) {
    give_up_at_ = now + kGiveUp;
    for (Worker& worker : workers_) {
      if (resizes() && !failure_ && stop_signal_ == 0 && worker.process && !worker.status)
        worker.why_killed = "did not stop when others did so that more ranks are started";
    }
    signal_all(SIGKILL);
  }
  output_.resume();
}

milliseconds LocalRanks::until_next_act() const {
  const auto now = Clock::now();
  auto next = next_look_;
  if (explain_75_ && *explain_75_ > now) next = std::min(next, *explain_75_);
  if (term_at_) next = std::min(next, *term_at_);
  if (give_up_at_) {
    next = std::min(next, *give_up_at_);
  } else if (kill_at_) {
    next = std::min(next, *kill_at_);
  }
  return std::max(milliseconds{0}, std::chrono::ceil<milliseconds>(next - now));
}

// Groups of ranks that have ended too: what they started may still be there.
void LocalRanks::signal_all(int signal) {
  sent_.insert(signal);
  for (const Worker& worker : workers_) {
    if (worker.process) worker.process->signal_group(signal);
  }
}

bool LocalRanks::all_ended() const {
  return std::all_of(workers_.begin(), workers_.end(),
                     [](const Worker& worker) { return !worker.process || worker.status; });
}

bool LocalRanks::over() const {
  if (give_up_at_ && *give_up_at_ <= Clock::now()) return true;
  if (!all_ended()) return false;
  // The rendezvous and the right to restart are shared: all nodes end an attempt together.
  return around_.link.alone() || global_end_ || stop_count_ > 1;
}

// What SIGKILL has not ended by now ends when the kernel allows that; it is not waited for.
bool LocalRanks::leave_behind() {
  bool any = false;
  for (Worker& worker : workers_) {
    if (!worker.process || worker.status) continue;
    any = true;
    const pid_t pid = worker.process->pid();
    around_.console.message(
        format("rank {} (pid {}) {} and does not end after SIGKILL; it is left "
               "behind, and ends when it can run again",
               worker.rank, pid, state_of(pid).text()));
    around_.poller.forget(worker.process->pidfd());
    worker.process->abandon();
  }
  return any;
}

// Everything the ranks wrote goes out. Only a process that left its group can hold a pipe open now.
void LocalRanks::drain(milliseconds time) {
  signal_all(SIGKILL);
  Deadline quiet(time);
  const Deadline patience(kStoppedPatience);
  while (!output_.is_over() && !quiet.passed()) {
    around_.poller.wait(milliseconds{20});
    act_on_time();
    if (output_.is_paused()) quiet = Deadline(time);
    // Who asked for an end does not wait for a reader that is stuck.
    if (stop_signal_ != 0 && patience.passed()) around_.console.discard();
  }
  output_.finish();
}

}  // namespace lockstep::launch
