// SPDX-License-Identifier: Apache-2.0
// `lockstep-torch`: the commands that need libtorch, one process a rank. `lockstep` starts it;
// loading libtorch takes half a second, which the other commands do not have to pay.
#include <ATen/Context.h>

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "lockstep/cli/bench/collectives_rank.h"
#include "lockstep/cli/bench/machine_rank.h"
#include "lockstep/cli/doctor/doctor_torch.h"
#include "lockstep/cli/infer/infer_rank.h"
#include "lockstep/cli/selftest_rank.h"
#include "lockstep/cli/train/train_rank.h"
#include "lockstep/core/input_file.h"
#include "lockstep/launch/processes/fork_server.h"

namespace {

using namespace lockstep;

int run_command(const std::vector<std::string>& arguments) {
  const std::map<std::string, int (*)(const std::vector<std::string>&)> commands{
      {"bench-collectives", cli::bench_collectives_rank},
      {"bench-machine", cli::bench_machine_rank},
      {"doctor", cli::doctor_torch},
      {"eval", cli::eval_rank},
      {"sample", cli::sample_rank},
      {"selftest", cli::selftest_rank},
      {"train", cli::train_rank}};
  try {
    const auto command = commands.find(arguments.empty() ? "" : arguments[0]);
    if (command == commands.end()) {
      throw ConfigError("lockstep-torch is started by lockstep; see lockstep --help");
    }
    return command->second({arguments.begin() + 1, arguments.end()});
  } catch (const ConfigError& failure) {
    std::cerr << "lockstep: " << failure.what() << "\n";
    return 2;
  } catch (const DataError& failure) {
    std::cerr << "lockstep: " << failure.what() << "\n";
    return 74;  // EX_IOERR
  } catch (const std::exception& failure) {
    std::cerr << "lockstep: " << failure.what() << "\n";
    return 1;
  }
}

}  // namespace

// Taking apart what libtorch has registered costs each rank a tenth of a second, so the process
// ends without it. Profilers of GPUs write what they have seen at a regular exit.
int main(int argc, char** argv) {
  launch::serve_forks();
  const int code = run_command({argv + 1, argv + argc});
  if (at::hasCUDA()) return code;
  std::cout.flush();
  std::cerr.flush();
  std::fflush(nullptr);
  std::quick_exit(code);
}
