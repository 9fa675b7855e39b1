// SPDX-License-Identifier: Apache-2.0
// How a generation of local ranks has ended, and what is said of it.
#include <sys/resource.h>

#include <algorithm>

#include "lockstep/core/format.h"
#include "lockstep/core/size_text.h"
#include "lockstep/launch/local_ranks.h"
#include "lockstep/launch/recovery_memory.h"

namespace lockstep::launch {
namespace {

// What the system allows a process, where that has ended it.
std::string limit_text(int signal) {
  if (signal != SIGXCPU && signal != SIGXFSZ) return "";
  rlimit limit{};
  getrlimit(signal == SIGXCPU ? RLIMIT_CPU : RLIMIT_FSIZE, &limit);
  return signal == SIGXCPU ? format(": the limit of CPU time (ulimit -t) is {} s", limit.rlim_cur)
                           : format(": the limit of file sizes (ulimit -f) is {}",
                                    size_text(static_cast<int64_t>(limit.rlim_cur)));
}

}  // namespace

Outcome LocalRanks::outcome() const {
  // Then 75 may be the answer to the launcher's own SIGTERM.
  const bool failed_elsewhere = global_end_ && global_end_->kind == Outcome::Kind::failed;
  if (is_resized()) {
    return {Outcome::Kind::resized, kSaved, true, {}, watch_.step(), ran_ms()};
  }
  if (failure_ && failure_->restartable && around_.link.alone() && must_save()) return *failure_;
  if (stop_signal_ != 0 || (any_left() && !failure_ && !failed_elsewhere && !resizes()))
    return stop_outcome();
  if (global_end_) {
    // A node that was lost has not told these.
    Outcome end = *global_end_;
    end.step = std::max(end.step, watch_.step());
    end.ran_ms = std::max(end.ran_ms, ran_ms());
    return end;
  }
  return failure_.value_or(Outcome{});
}

bool LocalRanks::any_left() const {
  return std::any_of(workers_.begin(), workers_.end(), [](const Worker& worker) {
    return worker.status && worker.status->code == kSaved;
  });
}

int64_t LocalRanks::ran_ms() const {
  return std::chrono::duration_cast<milliseconds>(Clock::now() - start_).count();
}

// A rank that misses another exits with a code, or aborts. So of these only the first counts, where
// nothing says which one it missed.
std::vector<int> LocalRanks::lost_places() const {
  std::vector<int> lost;
  const auto add = [&](size_t worker) { lost.push_back(world_.places[worker]); };
  for (size_t i = 0; i < workers_.size(); ++i) {
    if (workers_[i].by_itself || !workers_[i].why_killed.empty()) add(i);
  }
  if (lost.empty() && failed_) add(watch_.blamed().value_or(*failed_));
  return lost;
}

// They have left for that. If they were told to stop after that, they may be started again.
bool LocalRanks::is_resized() const {
  if (!resizes() || failure_ || !all_ended() || !any_left()) return false;
  if (global_end_ && global_end_->kind == Outcome::Kind::failed) return false;
  return stop_signal_ == 0 || must_save();
}

// They were told to stop, and what they have done since the last checkpoint is in memory only: they
// are started again, and told again.
bool LocalRanks::must_save() const {
  return stop_count_ == 1 && holds_copies(around_.facts.recovery_fd) && watch_.is_ready(0) &&
         watch_.saved_step() < std::max<int64_t>(0, watch_.step());
}

std::string LocalRanks::describe(const Worker& worker, const std::string& how) const {
  const LaunchOptions& options = around_.options;
  // All nodes print this line.
  const std::string node = options.nodes > 1 ? format(" on node {}", options.node_rank) : "";
  const std::string where = node.empty() ? " above" : node;
  const std::string log =
      options.log_dir.empty()
          ? format("its output is{}{}", where,
                   options.bare_rank_0 ? "" : " (--log-dir keeps it in files)")
          : "its log is " + log_folder(options.log_dir, attempt(), worker.rank) + node;
  return format("rank {}{} (pid {}) {}; {}", worker.rank, node, worker.process->pid(), how, log);
}

Outcome LocalRanks::local_failure(Worker& worker) {
  failed_ = static_cast<size_t>(&worker - workers_.data());
  const bool killed = worker.status->signal == SIGKILL && worker.why_killed.empty();
  const std::string why = watch_.note_failure(static_cast<int>(*failed_), killed);
  const std::string how = worker.why_killed.empty()
                              ? worker.status->text() + limit_text(worker.status->signal)
                              : worker.why_killed;
  return {Outcome::Kind::failed,
          worker.status->shell_code(),
          worker.status->signal != 0 || restart_may_help(worker.status->code),
          describe(worker, how + why),
          watch_.step(),
          ran_ms()};
}

Outcome LocalRanks::stop_outcome() const {
  const std::string by = stop_signal_ != 0 ? "stopped by " + signal_name(stop_signal_)
                                           : "stopped by a signal to a rank";
  bool by_themselves = true;
  int code = -1;  // that all ranks chose, 75 if some had nothing to save
  for (const Worker& worker : workers_) {
    if (!worker.status || worker.status->signal != 0) {
      by_themselves = false;
    } else if (code < 0 || (code == 0 && worker.status->code == 75)) {
      code = worker.status->code;
    } else if (code != worker.status->code && !(code == 75 && worker.status->code == 0)) {
      by_themselves = false;
    }
  }
  if (!by_themselves || code < 0) return {Outcome::Kind::stopped, 128 + stop_signal_, false, by};
  const int64_t saved = code == kSaved ? watch_.saved_step() : -1;
  const std::string what = saved >= 0                   ? format("saved step {}", saved)
                           : around_.options.ranks_save ? "ended; nothing was saved"
                                                        : "ended by themselves";
  return {Outcome::Kind::stopped, code, false,
          format("{}; the ranks {} (code {})", by, what, code)};
}

}  // namespace lockstep::launch
