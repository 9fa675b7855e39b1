// SPDX-License-Identifier: Apache-2.0
// `lockstep run`: starts the ranks of a job on this host, keeps their output apart, and ends them
// together.
#pragma once

#include <string>
#include <vector>

#include "lockstep/core/clock.h"
#include "lockstep/launch/places.h"

namespace lockstep::launch {

struct LaunchOptions {
  int ranks = 0;  // on each node
  int nodes = 1;
  // After failures the job continues with as few; 0: with all only. Of the two, one may be elastic.
  int min_ranks = 0, min_nodes = 0;
  // The first time that a place which has failed is left out before it is used again.
  std::chrono::seconds grow_after{60};
  StartSizes sizes;  // of `ranks`, that the program can use
  int node_rank = 0;
  std::string rendezvous;  // HOST:PORT on node 0; empty, on one node: loopback and a free port
  std::string interface;  // that hosts talk over; empty: LOCKSTEP_INTERFACE, or what reaches node 0
  milliseconds meet_time{60'000};  // that nodes wait for each other
  int max_restarts = 0;            // in an hour
  std::string log_dir;             // empty: no files
  int first_attempt = 0;  // in log_dir; run() and the nodes choose one that no earlier job has used
  int hang_rank = -1;     // -1: none
  std::string flight_dir;  // for dumps of the flight recorders; empty: log_dir, if that is given
  // The ranks answer SIGTERM, SIGINT, SIGUSR1 and SIGHUP by saving their state and ending with code
  // 75. `stop_grace` then counts from their last sign of life.
  bool ranks_save = false;
  // Rank 0 writes to the launcher's own stdout and stderr, without a prefix: it may draw on a
  // terminal.
  bool bare_rank_0 = false;
  std::string token_file;  // empty: LOCKSTEP_TOKEN, or on one node a new token
  // After a rank died: the time until the others get SIGTERM, and from there until SIGKILL.
  milliseconds grace{300};
  // After the launcher was asked to stop: the time until the ranks get SIGKILL.
  milliseconds stop_grace{30'000};
  std::vector<std::string> command;
  // The command's main() calls serve_forks(): its libraries are loaded once for all ranks, and stay
  // loaded for a restart.
  bool forks = false;

  int world_size() const { return ranks * nodes; }
  int first_rank() const { return ranks * node_rank; }
  Bounds rank_bounds() const { return {min_ranks > 0 ? min_ranks : ranks, ranks}; }
  Bounds node_bounds() const { return {min_nodes > 0 ? min_nodes : nodes, nodes}; }
  bool is_elastic() const { return rank_bounds().is_elastic() || node_bounds().is_elastic(); }
};

// Throws ConfigError naming the option, its value and the rule.
void validate(const LaunchOptions& options);

// Runs the job to its end, restarts included, and returns the exit status for the shell. Throws
// before anything is spawned where the options are wrong. Once per process, from its main thread;
// main() must know Guard::kCommand.
int run(const LaunchOptions& options);

}  // namespace lockstep::launch
