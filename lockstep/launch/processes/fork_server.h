// SPDX-License-Identifier: Apache-2.0
// A process that has loaded a program's libraries, and of which ranks are copies: they start in
// milliseconds where loading libtorch takes most of a second, at the first start and after a fault.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lockstep/core/fd.h"
#include "lockstep/launch/processes/process.h"

namespace lockstep::launch {

class ForkServer {
 public:
  // Starts a program whose main() calls serve_forks(). Ranks have the thread counts of this
  // environment, which libraries read when they are loaded. Makes this process the one that
  // orphans below it belong to. Throws SystemError where the program cannot be started.
  ForkServer(const std::vector<std::string>& argv, std::vector<std::string> environment);

  // A copy that runs on in main() as the command says; its argv is that of the server. A child of
  // this process like any other. Throws SystemError where the server is gone.
  Process start(const Command& command) const;

 private:
  Fd socket_;
  std::optional<Process> process_;
};

// For the beginning of main(), before any thread. Returns at once where the process is no server;
// in a server it returns in the copies, one for each that is asked for, and not in the server.
void serve_forks();

}  // namespace lockstep::launch
