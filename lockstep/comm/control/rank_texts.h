// SPDX-License-Identifier: Apache-2.0
// Short texts between all ranks of a group, and errors that all of them throw together.
// Private: not installed.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/group.h"

namespace lockstep::comm {

// Returns every rank's text, by rank. Texts may differ in length. Collective.
std::vector<std::string> gather_texts(const std::string& text, const Group& group,
                                      const CollectiveOptions& options = {});

// Calls `function` and returns what it returned on every rank, by rank. Where it threw on some
// ranks, each of these rethrows, and the others throw the first rank's error: CheckpointError or
// ConfigError as it was, else Error. `what` names the operation in messages. The other ranks wait
// up to 30 minutes for the slowest. Collective.
std::vector<std::string> run_on_all_ranks(const std::string& what, const Group& group,
                                          const std::function<std::string()>& function);

}  // namespace lockstep::comm
