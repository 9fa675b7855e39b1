// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/bootstrap/torchrun_store.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <cstdlib>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::comm {

bool torchrun_hosts_store() {
  const char* hosted = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
  return hosted != nullptr && std::string(hosted) == "True";
}

std::string share_through_torchrun(const RankEnv& env, const std::string& text,
                                   const Deadline& deadline) {
  try {
    c10d::TCPStoreOptions options;
    options.port = static_cast<uint16_t>(env.master_port);
    options.isServer = false;
    options.timeout = deadline.left();
    const auto server = c10::make_intrusive<c10d::TCPStore>(env.master_addr, options);
    c10d::PrefixStore store(format("/lockstep/attempt_{}", env.restart_count), server);
    // The n-th call of every rank is about one incarnation, whichever rank is ahead.
    const int64_t incarnation = store.add(format("calls/{}", env.rank), 1);
    const std::string key = format("rendezvous/{}", incarnation);
    if (env.rank == 0) store.set(key, std::vector<uint8_t>(text.begin(), text.end()));
    const auto value = store.get(key);
    return {value.begin(), value.end()};
  } catch (const std::exception& error) {
    const std::string words = error.what();
    throw CommError(format("[init] rank {}: no answer from torchrun's store at {}:{}: {}", env.rank,
                           env.master_addr, env.master_port, words.substr(0, words.find('\n'))));
  }
}

}  // namespace lockstep::comm
