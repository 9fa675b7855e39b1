// SPDX-License-Identifier: Apache-2.0
// One generation of ranks on this host, from their start to their last line.
#pragma once

#include <optional>
#include <set>
#include <vector>

#include "lockstep/launch/launcher.h"
#include "lockstep/launch/node_link.h"
#include "lockstep/launch/outcome.h"
#include "lockstep/launch/processes/console.h"
#include "lockstep/launch/processes/fork_server.h"
#include "lockstep/launch/processes/guard.h"
#include "lockstep/launch/processes/poller.h"
#include "lockstep/launch/processes/process.h"
#include "lockstep/launch/processes/signals.h"
#include "lockstep/launch/rank_output.h"
#include "lockstep/launch/rank_variables.h"
#include "lockstep/launch/watch/rank_watch.h"
#include "lockstep/launch/world.h"

namespace lockstep::launch {

// What outlives an attempt.
struct Surroundings {
  const LaunchOptions& options;
  const JobFacts& facts;
  Poller& poller;
  Console& console;
  Signals& signals;
  const Guard& guard;
  NodeLink& link;
  const ForkServer* forks;  // null: each rank loads its program itself
};

class LocalRanks {
 public:
  LocalRanks(const Surroundings& around, World world);
  ~LocalRanks();
  LocalRanks(const LocalRanks&) = delete;
  LocalRanks& operator=(const LocalRanks&) = delete;

  // Starts the ranks and returns when none of them is left.
  Outcome run();
  // Of this node: whose ranks have failed by themselves, and not because others had. Once they have
  // ended.
  std::vector<int> lost_places() const;

 private:
  struct Worker {
    int rank;
    std::optional<Process> process;  // empty if it could not be started
    std::optional<ExitStatus> status;
    bool told_to_stop = false;
    bool by_itself = false;       // a signal that is not the launcher's has ended it
    std::string why_killed = {};  // where the launcher did it
  };

  void start_all();
  void start(int local_rank, const std::vector<int>& cores);
  void start_process(Worker& worker, const Command& command) const;
  void add_log(Fd pipe, int rank, Console::Stream stream);

  void on_signal();
  void on_child();
  void look_after();
  void on_news();
  void on_worker_end(Worker& worker);
  void stop(int signal);
  void pass_stop_on();
  void ask_to_resize();
  // Ranks leave at a step boundary because of this node's request, or of another node's.
  bool resizes() const { return resizing_ || resize_told_; }
  bool is_resized() const;
  bool must_save() const;

  // The ending of a job: SIGTERM at one time, SIGKILL at a later one; both only ever move forward.
  void end_soon(milliseconds until_term, milliseconds until_kill);
  void act_on_time();
  milliseconds until_next_act() const;
  void signal_all(int signal);
  bool all_ended() const;
  bool over() const;
  bool leave_behind();
  void drain(milliseconds time);

  // Which of the log folder's.
  int attempt() const {
    return around_.options.first_attempt + world_.generation + world_.attempts_skipped;
  }
  std::string describe(const Worker& worker, const std::string& how) const;
  Outcome local_failure(Worker& worker);
  Outcome stop_outcome() const;
  bool any_left() const;  // with kSaved
  int64_t ran_ms() const;
  Outcome outcome() const;

  const Surroundings around_;
  const World world_;
  const Clock::time_point start_;
  RankWatch watch_;
  std::vector<Worker> workers_;
  RankOutput output_;
  std::optional<Outcome> failure_, global_end_;
  int stop_signal_ = 0, stop_count_ = 0;
  bool told_done_ = false;
  std::optional<size_t> failed_;  // the worker that did first
  std::set<int> sent_;            // signals: a rank that they end is not lost
  bool resizing_ = false;         // the ranks have been asked
  bool resize_told_ = false;      // by node 0: ranks of other nodes may have been asked first
  std::optional<Clock::time_point> resize_at_;
  Clock::time_point next_look_;
  std::optional<Clock::time_point> term_at_, kill_at_, give_up_at_;
  std::optional<Clock::time_point> hard_end_;  // of a stop that shows life for ever
  std::optional<Clock::time_point>
      explain_75_;  // by when a rank that left with it must not be alone
};

}  // namespace lockstep::launch
