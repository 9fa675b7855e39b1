// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/common/start_ranks.h"

#include <unistd.h>

#include "lockstep/cli/common/torch_program.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::cli {

using Words = std::vector<std::string>;

const Words& backend_names() {
  static const Words kNames{"thread", "shm", "mpi", "gloo", "nccl"};
  return kNames;
}

Words start_ranks(const std::string& backend, int ranks, const Words& command) {
  Words words;
  if (backend == "thread") {
    words = command;
    words.insert(words.end(), {"--threads", std::to_string(ranks)});
    return words;
  }
  if (backend == "mpi") {
    words = {"mpirun", "-n", std::to_string(ranks), "--oversubscribe"};
    if (geteuid() == 0) words.push_back("--allow-run-as-root");
    // One core a rank where there are enough, as our launcher does.
    words.insert(words.end(),
                 {"--bind-to", ranks <= sysconf(_SC_NPROCESSORS_ONLN) ? "core" : "none"});
  } else {
    words = {own_path(), "run", "-n", std::to_string(ranks)};
  }
  words.insert(words.end(), command.begin(), command.end());
  return words;
}

void check_ranks(const char* command, int ranks) {
  if (ranks < 1) throw ConfigError(format("{}: -n is {}, must be at least 1", command, ranks));
}

}  // namespace lockstep::cli
