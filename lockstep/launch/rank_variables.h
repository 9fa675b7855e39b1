// SPDX-License-Identifier: Apache-2.0
// The environment of a rank: torchrun's variables, Lockstep's own, and thread counts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/launch/launcher.h"
#include "lockstep/launch/world.h"

namespace lockstep::launch {

// Of a job that may continue with fewer ranks: the number of ranks when all places are in use.
inline constexpr const char* kMaxWorldVariable = "LOCKSTEP_MAX_WORLD_SIZE";
// How the world differs from that of the start before: "STEP FROM LOST". The step that was reached
// (-1: unknown), the number of ranks until then, and which ranks or nodes were lost ("rank 2";
// nothing where the world has grown). Not set where it does not differ.
inline constexpr const char* kChangeVariable = "LOCKSTEP_WORLD_CHANGE";

// What the ranks of a job must know and restarts do not change.
struct JobFacts {
  std::string run_id;
  std::string rendezvous;   // host:port
  std::string master_addr;  // for programs that bring their own rendezvous
  uint16_t master_port = 0;
  int token_fd = -1;
  int recovery_fd = -1;  // -1: the job is not restarted
  int cores = 1;         // this process may use
};

// "NAME=value" for each: this process's environment with the rank's own on top.
std::vector<std::string> rank_variables(const LaunchOptions& options, const JobFacts& facts,
                                        const World& world, int local_rank, int generation,
                                        int flight_fd);

// Whether the user has chosen the number of threads by OMP_NUM_THREADS. torchrun sets it to 1 where
// the user has not, which does not count.
bool user_set_threads();

}  // namespace lockstep::launch
