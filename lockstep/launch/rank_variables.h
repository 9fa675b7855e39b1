// SPDX-License-Identifier: Apache-2.0
// The environment of a rank: torchrun's variables, Lockstep's own, and thread counts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/launch/launcher.h"

namespace lockstep::launch {

// What the ranks of a job must know and restarts do not change.
struct JobFacts {
  std::string run_id;
  std::string rendezvous;   // host:port
  std::string master_addr;  // for programs that bring their own rendezvous
  uint16_t master_port = 0;
  int token_fd = -1;
  int cores = 1;  // this process may use
};

// "NAME=value" for each: this process's environment with the rank's own on top.
std::vector<std::string> rank_variables(const LaunchOptions& options, const JobFacts& facts,
                                        int local_rank, int generation, int flight_fd);

// Whether the user has chosen the number of threads by OMP_NUM_THREADS. torchrun sets it to 1 where
// the user has not, which does not count.
bool user_set_threads();

}  // namespace lockstep::launch
