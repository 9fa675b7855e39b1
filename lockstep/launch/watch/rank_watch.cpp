// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/watch/rank_watch.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/flight/dump.h"
#include "lockstep/flight/stacks.h"
#include "lockstep/launch/processes/process.h"

namespace lockstep::launch {
namespace {

constexpr milliseconds kStopNamed{1'300};
constexpr milliseconds kStopReplaced{3'500};
constexpr milliseconds kSilence{2'000};
constexpr milliseconds kStackTime{1'000};  // that a rank has to say where its threads are
constexpr milliseconds kSaySlowEvery{60'000};

double seconds(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch())
      .count();
}

}  // namespace

RankWatch::RankWatch(int first_rank, int ranks, std::string folder, bool replaces, Console& console)
    : first_rank_(first_rank),
      folder_(std::move(folder)),
      replaces_(replaces),
      console_(console),
      ranks_(static_cast<size_t>(ranks)),
      last_look_(Clock::now()) {
  for (Rank& rank : ranks_) {
    rank.memory = Fd(memfd_create(flight::kPageName, MFD_CLOEXEC));
    // A limit of file sizes holds for such memory too. Then the rank keeps its own.
    if (rank.memory.valid() && ftruncate(rank.memory.get(), sizeof(flight::Page)) != 0)
      rank.memory.reset();
    const bool shared = rank.memory.valid();
    void* const memory =
        mmap(nullptr, sizeof(flight::Page), PROT_READ | PROT_WRITE,
             shared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS, rank.memory.get(), 0);
    if (memory == MAP_FAILED) throw SystemError("the flight recorder's memory", errno);
    rank.page = static_cast<flight::Page*>(memory);
  }
}

RankWatch::~RankWatch() {
  for (const Rank& rank : ranks_) {
    if (rank.page != nullptr) munmap(rank.page, sizeof(flight::Page));
  }
}

int RankWatch::descriptor(int local_rank) const {
  return ranks_[static_cast<size_t>(local_rank)].memory.get();
}

void RankWatch::started(int local_rank, pid_t process) {
  Rank& rank = ranks_[static_cast<size_t>(local_rank)];
  rank.process = process;
  rank.kills.emplace(process);
  // Starting it may have taken long: the first one waits for its libraries.
  rank.moved_at = last_look_ = Clock::now();
}

void RankWatch::on_stop(int local_rank, int signal) {
  Rank& rank = ranks_[static_cast<size_t>(local_rank)];
  if (signal != 0) {
    if (!rank.stopped_at) rank.stopped_at = Clock::now();
    rank.stop_signal = signal;
    return;
  }
  if (rank.stop_said) {
    console_.message(format("{} continues after {:.1f} s", name(rank),
                            seconds(Clock::now() - *rank.stopped_at)));
  }
  rank.stopped_at.reset();
  rank.stop_said = false;
}

void RankWatch::on_end(int local_rank, const std::string& how) {
  Rank& rank = ranks_[static_cast<size_t>(local_rank)];
  rank.ended = true;
  rank.end = how;
  rank.ended_at = now_ns();
  rank.stopped_at.reset();
}

std::string RankWatch::name(const Rank& rank) const {
  return format("rank {} (pid {})", first_rank_ + static_cast<int>(&rank - ranks_.data()),
                rank.process);
}

bool RankWatch::is_stopped(int local_rank) const {
  return ranks_[static_cast<size_t>(local_rank)].stopped_at.has_value();
}

bool RankWatch::is_known(int local_rank) const {
  const flight::Page* const page = ranks_[static_cast<size_t>(local_rank)].page;
  return page->magic.load(std::memory_order_acquire) == flight::kMagic;
}

bool RankWatch::is_ready(int local_rank) const {
  return is_known(local_rank) || !ranks_[static_cast<size_t>(local_rank)].memory.valid();
}

int64_t RankWatch::step() const {
  int64_t furthest = -1;
  for (size_t i = 0; i < ranks_.size(); ++i) {
    if (is_known(static_cast<int>(i))) furthest = std::max(furthest, ranks_[i].page->step.load());
  }
  return furthest;
}

int64_t RankWatch::saved_step() const {
  int64_t saved = INT64_MAX;
  for (size_t i = 0; i < ranks_.size(); ++i)
    saved = std::min(saved, is_known(static_cast<int>(i)) ? ranks_[i].page->saved_step.load() : -1);
  return saved;
}

milliseconds RankWatch::longest_step() const {
  int64_t longest = 0;
  for (const Rank& rank : ranks_) {
    const uint64_t steps = rank.page->steps.load();
    for (uint64_t i = 0; i < std::min<uint64_t>(steps, flight::kSteps); ++i)
      longest = std::max(longest, rank.page->step_times[i].nanoseconds);
  }
  return milliseconds{longest / 1'000'000};
}

bool RankWatch::has_moved() {
  bool moved = false;
  for (Rank& rank : ranks_) {
    const uint64_t signs = rank.page->signs.load(std::memory_order_relaxed);
    moved |= signs != rank.signs_before;
    rank.signs_before = signs;
  }
  return moved;
}

std::vector<flight::Flight> RankWatch::flights() const {
  std::vector<flight::Flight> all;
  for (size_t i = 0; i < ranks_.size(); ++i) {
    if (!is_known(static_cast<int>(i))) continue;
    all.push_back(flight::read_page(*ranks_[i].page));
    all.back().end = ranks_[i].end;
    all.back().ended_at = ranks_[i].ended_at;
  }
  return all;
}

void RankWatch::look() {
  const auto now = Clock::now();
  // This process did not run either: the host was suspended, or its cgroup frozen.
  if (const auto gap = now - last_look_; gap > 10 * kInterval) {
    for (Rank& rank : ranks_) {
      if (rank.stopped_at) *rank.stopped_at += gap;
      rank.moved_at += gap;
    }
    if (gap > milliseconds{5'000})
      console_.message(format("the launcher did not run for {:.1f} s", seconds(gap)));
  }
  last_look_ = now;
  bool still = false;
  for (Rank& rank : ranks_) {
    const uint64_t signs = rank.page->signs.load(std::memory_order_relaxed);
    if (signs != rank.signs) {
      rank.signs = signs;
      rank.moved_at = now;
    }
    still |= !rank.ended && now - rank.moved_at >= kSilence - kInterval;
  }
  look_for_stops();
  if (still) look_for_late(now);
  look_for_slow();
  say_reports();
}

void RankWatch::look_for_stops() {
  const auto now = Clock::now();
  for (Rank& rank : ranks_) {
    if (!rank.stopped_at || rank.stop_said || now - *rank.stopped_at < kStopNamed) continue;
    rank.stop_said = true;
    const ProcessState state = state_of(rank.process);
    console_.message(format("{} is stopped by {}; kill -CONT {} continues it{}", name(rank),
                            signal_name(rank.stop_signal), rank.process,
                            replaces_ && !state.held_on_purpose()
                                ? format(", and it is replaced in {:.0f} s otherwise",
                                         seconds(kStopReplaced - kStopNamed))
                                : ""));
  }
}

// Where all are stopped, the job was suspended on purpose.
std::optional<int> RankWatch::to_replace() const {
  if (!replaces_) return std::nullopt;
  std::optional<int> found;
  bool all = true;
  for (size_t i = 0; i < ranks_.size(); ++i) {
    const Rank& rank = ranks_[i];
    if (rank.ended) continue;
    all &= rank.stopped_at.has_value();
    if (rank.stopped_at && last_look_ - *rank.stopped_at >= kStopReplaced &&
        !state_of(rank.process).held_on_purpose())
      found = static_cast<int>(i);
  }
  return all ? std::nullopt : found;
}

void RankWatch::look_for_late(Clock::time_point now) {
  const std::vector<flight::Flight> all = flights();
  const auto culprit = flight::find_culprit(all, /*patient=*/true);
  if (!culprit) {
    const bool waits = std::ranges::any_of(
        all, [](const flight::Flight& flight) { return flight.awaited() != nullptr; });
    if (!waits) look_for_silence(now);
    return;
  }
  const int local = culprit->rank - first_rank_;
  if (culprit->kind == flight::Culprit::Kind::mismatch ||
      !said_late_.insert({culprit->rank, culprit->operation.number}).second)
    return;
  const Rank& rank = ranks_[static_cast<size_t>(local)];
  if (rank.ended || rank.stopped_at) return;  // of which is told already
  const ProcessState state = state_of(rank.process);
  report(local, format("rank {} is late: {}; {} {}", culprit->rank, culprit->text, name(rank),
                       state.text()));
}

// No rank waits in an operation, and none moves.
void RankWatch::look_for_silence(Clock::time_point now) {
  auto moved = Clock::time_point::min();
  int running = -1;
  for (size_t i = 0; i < ranks_.size(); ++i) {
    const Rank& rank = ranks_[i];
    if (rank.ended) continue;
    // Before some steps it is not known how long one takes; loading and saving take what they take.
    if (rank.page->steps.load() < 3 || rank.page->phase.load() != flight::Phase::training) return;
    if (running < 0 && !rank.stopped_at) running = static_cast<int>(i);
    moved = std::max(moved, rank.moved_at);
  }
  const auto patience = std::max<Clock::duration>(kSilence, 10 * longest_step());
  if (now - moved < patience) {
    said_silence_ = false;
    return;
  }
  if (running < 0 || said_silence_) return;
  said_silence_ = true;
  const Rank& rank = ranks_[static_cast<size_t>(running)];
  report(running,
         format("no rank has called an operation or finished a step for {:.1f} s, where steps took "
                "at most {:.2f} s; {} {}, {}",
                seconds(now - moved), seconds(longest_step()), name(rank),
                state_of(rank.process).text(), flight::read_page(*rank.page).doing()));
}

// Ranks that compute much longer than the others, which wait for them.
void RankWatch::look_for_slow() {
  const int64_t step = this->step();
  if (ranks_.size() < 2 || step <= judged_step_) return;
  std::vector<int64_t> busy;
  for (const Rank& rank : ranks_) {
    const uint64_t steps = rank.page->steps.load(std::memory_order_acquire);
    if (steps == 0 || rank.page->step.load() != step) return;  // they are between two steps
    const flight::StepTime& last = rank.page->step_times[(steps - 1) % flight::kSteps];
    if (last.step.load(std::memory_order_acquire) != step) return;
    busy.push_back(last.nanoseconds - last.blocked);
  }
  judged_step_ = step;
  const auto now = Clock::now();
  for (const flight::SlowRank& slow : slow_ranks_.judge(busy)) {
    if (const auto said = said_slow_.find(slow.rank);
        said != said_slow_.end() && now - said->second < kSaySlowEvery)
      continue;
    said_slow_[slow.rank] = now;
    console_.message(
        format("{} is slow: in step {} it computed for {:.2f} s, the other ranks for "
               "{:.2f} s (median), and they wait for it",
               name(ranks_[static_cast<size_t>(slow.rank)]), step,
               static_cast<double>(slow.busy_ns) / 1e9, static_cast<double>(slow.usual_ns) / 1e9));
  }
}

// ---- stacks and dumps ----

void RankWatch::report(int local_rank, const std::string& text) {
  flight::ask_for_stacks(*ranks_[static_cast<size_t>(local_rank)].page);
  reports_.push_back({local_rank, text, Deadline(kStackTime)});
}

void RankWatch::say_reports() {
  std::erase_if(reports_, [&](const Report& report) {
    const Rank& rank = ranks_[static_cast<size_t>(report.local_rank)];
    const bool answered = flight::has_answered(*rank.page);
    if (!answered && !report.due.passed() && !rank.ended) return false;
    std::string stacks = answered ? flight::read_page(*rank.page).stacks : "";
    if (!stacks.empty()) stacks.pop_back();  // message() ends the line
    console_.message(stacks.empty() ? report.text + "; its threads do not answer"
                                    : report.text + "\n" + stacks);
    write(flights());
    return true;
  });
  if (!dump_due_) return;
  const bool all = std::ranges::all_of(ranks_, [](const Rank& rank) {
    return rank.ended || !rank.page->answers.load() || flight::has_answered(*rank.page);
  });
  if (!all && !dump_due_->passed()) return;
  dump_due_.reset();
  const auto now = flights();
  write(now);
  for (const flight::Flight& flight : now)
    console_.message(format("rank {}: {}", flight.rank, flight.doing()));
  if (!folder_.empty()) console_.message(format("the flight recorders are in {}", folder_));
}

void RankWatch::dump_soon() {
  for (const Rank& rank : ranks_) {
    if (!rank.ended) flight::ask_for_stacks(*rank.page);
  }
  dump_due_ = Deadline(kStackTime);
}

void RankWatch::write(const std::vector<flight::Flight>& flights) {
  if (folder_.empty()) return;
  try {
    for (const flight::Flight& flight : flights) flight::write_dump(folder_, flight.rank, flight);
  } catch (const Error& failure) {
    console_.message(failure.what());
  }
}

std::string RankWatch::note_failure(int local_rank, bool killed) {
  const Rank& rank = ranks_[static_cast<size_t>(local_rank)];
  noted_ = flights();
  blamed_.reset();
  if (killed) {
    const auto why = rank.kills ? rank.kills->since() : std::nullopt;
    return why ? format(": {}", *why) : "";
  }
  for (const Rank& other : ranks_) {
    if (other.stopped_at) {
      blamed_ = static_cast<size_t>(&other - ranks_.data());
      return format("; {} is stopped by {} for {:.1f} s", name(other),
                    signal_name(other.stop_signal), seconds(Clock::now() - *other.stopped_at));
    }
  }
  const auto culprit = flight::find_culprit(noted_, /*patient=*/true);
  if (!culprit || culprit->rank == first_rank_ + local_rank) return "";
  blamed_ = static_cast<size_t>(culprit->rank - first_rank_);
  return "; " + culprit->text;
}

void RankWatch::finish() {
  for (flight::Flight& flight : noted_) {
    const Rank& rank = ranks_[static_cast<size_t>(flight.rank - first_rank_)];
    flight.end = rank.end;
    flight.ended_at = rank.ended_at;
  }
  write(noted_);
}

}  // namespace lockstep::launch
