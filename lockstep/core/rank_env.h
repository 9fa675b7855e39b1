// SPDX-License-Identifier: Apache-2.0
// Rank, world size and rendezvous address of this process, as its launcher set them.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep {

enum class Launcher { none, lockstep, torchrun, openmpi, mpich, mvapich, pmix, slurm };

std::string_view name_of(Launcher launcher);

struct RankEnv {
  int rank = 0;
  int world_size = 1;
  // What the launcher says of this host. comm::init replaces both by the real host layout where
  // they are missing.
  std::optional<int> local_rank = std::nullopt;
  std::optional<int> local_size = std::nullopt;
  Launcher launcher = Launcher::none;
  std::string master_addr = {};  // empty where the launcher gives none
  int master_port = 0;
  int restart_count = 0;

  // First complete set wins: RANK+WORLD_SIZE, OMPI_*, MV2_*/PMI_*, PMIX_RANK (+Slurm size), a Slurm
  // step, one process. Throws ConfigError where the winning set contradicts itself.
  static RankEnv detect();

  // The same with another reader of variables, for tests.
  using Lookup = std::function<std::optional<std::string>(const char* name)>;
  static RankEnv detect(const Lookup& lookup);
};

// The name of this host, as the kernel has it.
std::string host_name();

// "node[001-003,007],other" to its first host, keeping zero padding.
std::string first_slurm_host(std::string_view node_list);

}  // namespace lockstep
