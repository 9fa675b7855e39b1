// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/rank_variables.h"

#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <map>

#include "lockstep/core/format.h"
#include "lockstep/flight/recorder.h"
#include "lockstep/launch/processes/affinity.h"

namespace lockstep::launch {

namespace {

constexpr const char* kThreads = "OMP_NUM_THREADS";

// A process's environment in /proc is the one that it was started with: torchrun's own has the
// variable only if the user has set it.
bool torchrun_set_threads() {
  if (std::getenv("TORCHELASTIC_RUN_ID") == nullptr ||
      std::getenv("LOCKSTEP_RENDEZVOUS") != nullptr)
    return false;
  std::ifstream parent(format("/proc/{}/environ", getppid()));
  if (parent.peek() == std::ifstream::traits_type::eof()) return false;  // not ours to read
  for (std::string entry; std::getline(parent, entry, '\0');) {
    if (entry.starts_with(format("{}=", kThreads))) return false;
  }
  return true;
}

}  // namespace

bool user_set_threads() { return std::getenv(kThreads) != nullptr && !torchrun_set_threads(); }

std::vector<std::string> rank_variables(const LaunchOptions& options, const JobFacts& facts,
                                        int local_rank, int generation, int flight_fd) {
  std::map<std::string, std::string> values;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text(*entry);
    const size_t equals = text.find('=');
    if (equals != std::string::npos) values[text.substr(0, equals)] = text.substr(equals + 1);
  }
  // The token goes by descriptor, where ps and /proc do not show it.
  values.erase("LOCKSTEP_TOKEN");

  const auto number = [](long value) { return std::to_string(value); };
  const std::string rank = number(options.first_rank() + local_rank);
  const std::string world_size = number(options.world_size());
  values["RANK"] = rank;
  values["WORLD_SIZE"] = world_size;
  values["LOCAL_RANK"] = number(local_rank);
  values["LOCAL_WORLD_SIZE"] = number(options.ranks);
  values["GROUP_RANK"] = number(options.node_rank);
  values["GROUP_WORLD_SIZE"] = number(options.nodes);
  values["ROLE_RANK"] = rank;
  values["ROLE_WORLD_SIZE"] = world_size;
  values["ROLE_NAME"] = "default";
  values["MASTER_ADDR"] = facts.master_addr;
  values["MASTER_PORT"] = number(facts.master_port);
  values["TORCHELASTIC_RESTART_COUNT"] = number(generation);
  values["TORCHELASTIC_MAX_RESTARTS"] = number(options.max_restarts);
  values["TORCHELASTIC_RUN_ID"] = facts.run_id;
  values["TORCHELASTIC_USE_AGENT_STORE"] = "False";
  values["LOCKSTEP_RENDEZVOUS"] = facts.rendezvous;
  values["LOCKSTEP_TOKEN_FD"] = number(facts.token_fd);
  values["LOCKSTEP_GENERATION"] = number(generation);
  values[flight::kVariable] = number(flight_fd);

  // emplace: what the user set stays.
  const std::string threads = number(threads_per_rank(facts.cores, options.ranks));
  values.emplace("OMP_NUM_THREADS", threads);
  values.emplace("OPENBLAS_NUM_THREADS", threads);
  if (!options.interface.empty()) {
    values["LOCKSTEP_INTERFACE"] = options.interface;
    // For programs that bring engines of their own.
    values.emplace("GLOO_SOCKET_IFNAME", options.interface);
    values.emplace("NCCL_SOCKET_IFNAME", "=" + options.interface);  // "=": not every eth1*
  }
  // A rank that sits in a debugger is not late.
  if (options.hang_rank >= 0) values.emplace("LOCKSTEP_TIMEOUT", "86400");

  std::vector<std::string> entries;
  for (const auto& [name, value] : values) entries.push_back(name + "=" + value);
  return entries;
}

}  // namespace lockstep::launch
