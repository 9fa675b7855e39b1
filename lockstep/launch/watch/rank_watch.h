// SPDX-License-Identifier: Apache-2.0
// Looks after the ranks of one generation on this host: which of them is stopped, late, slow, or
// has left the order of the others. Reads their flight recorders; no rank has to answer.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lockstep/core/clock.h"
#include "lockstep/core/fd.h"
#include "lockstep/flight/culprit.h"
#include "lockstep/flight/flight.h"
#include "lockstep/flight/slow_ranks.h"
#include "lockstep/launch/processes/console.h"
#include "lockstep/launch/watch/process_state.h"

namespace lockstep::launch {

class RankWatch {
 public:
  // How often look() is to be called.
  static constexpr milliseconds kInterval{100};

  // `folder`: for dumps; empty: none are written. `replaces`: a rank that stays stopped may be
  // replaced.
  RankWatch(int first_rank, int ranks, std::string folder, bool replaces, Console& console);
  ~RankWatch();
  RankWatch(const RankWatch&) = delete;
  RankWatch& operator=(const RankWatch&) = delete;

  // The memory that a rank inherits.
  int descriptor(int local_rank) const;
  void started(int local_rank, pid_t process);
  // A signal has stopped it, or it continues (0).
  void on_stop(int local_rank, int signal);
  // How it ended, for the dump; no more is said of it.
  void on_end(int local_rank, const std::string& how);

  void look();
  // A rank that has been stopped for too long.
  std::optional<int> to_replace() const;
  bool is_stopped(int local_rank) const;

  // All pages are asked for stacks, and written when they have answered; or said, without a folder.
  void dump_soon();
  // What the ranks did when the first of them failed: kept for finish(). The words to add to that
  // failure: another rank that it waited for, or why the kernel killed it.
  std::string note_failure(int local_rank, bool killed);
  // The rank that these words name.
  std::optional<size_t> blamed() const { return blamed_; }
  // After all have ended; writes what was noted.
  void finish();

  // Has any rank shown life since this was called last?
  bool has_moved();
  // Its program has joined the job, or there is no way to know.
  bool is_ready(int local_rank) const;
  int64_t step() const;        // the furthest; -1 where no program counts steps
  int64_t saved_step() const;  // by all ranks; -1: none
  milliseconds longest_step() const;

 private:
  struct Rank {
    Fd memory;
    flight::Page* page = nullptr;
    pid_t process = -1;
    std::optional<MemoryKills> kills;
    std::optional<Clock::time_point> stopped_at;
    int stop_signal = 0;
    bool stop_said = false, ended = false;
    std::string end;
    int64_t ended_at = 0;
    uint64_t signs = 0;
    Clock::time_point moved_at{};
    uint64_t signs_before = 0;  // of has_moved()
  };
  struct Report {  // that waits for stacks
    int local_rank;
    std::string text;
    Deadline due;
  };

  bool is_known(int local_rank) const;  // it writes to its page
  std::vector<flight::Flight> flights() const;
  void look_for_stops();
  void look_for_late(Clock::time_point now);
  void look_for_silence(Clock::time_point now);
  void look_for_slow();
  void report(int local_rank, const std::string& text);
  void say_reports();
  void write(const std::vector<flight::Flight>& flights);
  std::string name(const Rank& rank) const;

  const int first_rank_;
  const std::string folder_;
  const bool replaces_;
  Console& console_;
  std::vector<Rank> ranks_;
  std::vector<Report> reports_;
  std::optional<Deadline> dump_due_;
  std::vector<flight::Flight> noted_;
  std::optional<size_t> blamed_;
  Clock::time_point last_look_;
  std::set<std::pair<int, uint64_t>> said_late_;  // rank, and the number of the operation
  bool said_silence_ = false;
  int64_t judged_step_ = -1;
  flight::SlowRanks slow_ranks_;
  std::map<int, Clock::time_point> said_slow_;
};

}  // namespace lockstep::launch
