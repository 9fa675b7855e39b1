// SPDX-License-Identifier: Apache-2.0
// Short texts between all ranks of a group, and with them who failed. Private: not installed.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "lockstep/comm/group.h"

namespace lockstep::checkpoint::detail {

// Collective: every rank's text, by rank.
std::vector<std::string> exchange_texts(const std::string& mine, const comm::Group& group);

// Collective. Calls the function, and returns what it returned on every rank. Where it threw on
// any, all ranks throw CheckpointError, ConfigError or Error: a rank whose disk is full does not
// leave the others waiting.
std::vector<std::string> run_on_all_ranks(const char* what, const comm::Group& group,
                                          const std::function<std::string()>& function);

}  // namespace lockstep::checkpoint::detail
