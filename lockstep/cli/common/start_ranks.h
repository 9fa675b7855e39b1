// SPDX-License-Identifier: Apache-2.0
// Starting ranks of lockstep-torch on this machine, each backend in its way.
#pragma once

#include <string>
#include <vector>

namespace lockstep::cli {

// What --backend accepts.
const std::vector<std::string>& backend_names();

// The words that start `command` with this many ranks: threads in one process, mpirun, or our own
// launcher.
std::vector<std::string> start_ranks(const std::string& backend, int ranks,
                                     const std::vector<std::string>& command);

// Throws ConfigError that names the command where -n is not a count.
void check_ranks(const char* command, int ranks);

}  // namespace lockstep::cli
