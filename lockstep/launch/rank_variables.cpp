// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/rank_variables.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "lockstep/core/format.h"
#include "lockstep/flight/recorder.h"
#include "lockstep/launch/processes/affinity.h"
#include "lockstep/launch/recovery_memory.h"

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

// GPU i belongs to place i where there is one for each, so that one that has failed is left out
// with its place. Empty: nothing is to be said.
std::string devices_of(const World& world, int places) {
  bool in_place = true;
  for (int i = 0; i < world.ranks(); ++i) in_place &= world.places[static_cast<size_t>(i)] == i;
  if (in_place) return {};
  std::vector<std::string> devices;
  if (const char* const chosen = std::getenv("CUDA_VISIBLE_DEVICES")) {
    std::istringstream words(chosen);
    for (std::string word; std::getline(words, word, ',');) devices.push_back(word);
  } else {
    std::error_code none;
    for (std::filesystem::directory_iterator gpu("/proc/driver/nvidia/gpus", none), end;
         !none && gpu != end; gpu.increment(none))
      devices.push_back(std::to_string(devices.size()));
  }
  if (static_cast<int>(devices.size()) != places) return {};
  std::string list;
  for (const int place : world.places)
    list += (list.empty() ? "" : ",") + devices[static_cast<size_t>(place)];
  return list;
}

}  // namespace

bool user_set_threads() { return std::getenv(kThreads) != nullptr && !torchrun_set_threads(); }

std::vector<std::string> rank_variables(const LaunchOptions& options, const JobFacts& facts,
                                        const World& world, int local_rank, int generation,
                                        int flight_fd) {
  std::map<std::string, std::string> values;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text(*entry);
    const size_t equals = text.find('=');
    if (equals != std::string::npos) values[text.substr(0, equals)] = text.substr(equals + 1);
  }
  // The token goes by descriptor, where ps and /proc do not show it.
  values.erase("LOCKSTEP_TOKEN");

  const auto number = [](long value) { return std::to_string(value); };
  const std::string rank = number(world.first_rank + local_rank);
  const std::string world_size = number(world.size);
  values["RANK"] = rank;
  values["WORLD_SIZE"] = world_size;
  values["LOCAL_RANK"] = number(local_rank);
  values["LOCAL_WORLD_SIZE"] = number(world.ranks());
  values["GROUP_RANK"] = number(world.node);
  values["GROUP_WORLD_SIZE"] = number(world.nodes);
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
  values.erase(kRecoveryVariable);
  if (facts.recovery_fd >= 0) values[kRecoveryVariable] = number(facts.recovery_fd);

  values.erase(kMaxWorldVariable);
  if (options.is_elastic()) values[kMaxWorldVariable] = number(options.world_size());
  values.erase(kChangeVariable);
  if (!world.change.empty()) values[kChangeVariable] = world.change;
  const std::string devices = devices_of(world, options.ranks);
  if (!devices.empty()) values["CUDA_VISIBLE_DEVICES"] = devices;

  // emplace: what the user set stays.
  const std::string threads = number(threads_per_rank(facts.cores, world.ranks()));
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
