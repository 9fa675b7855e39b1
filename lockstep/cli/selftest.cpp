// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/selftest.h"

#include <optional>

#include "lockstep/cli/common/options.h"
#include "lockstep/cli/common/start_ranks.h"
#include "lockstep/cli/common/torch_program.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/rank_env.h"

namespace lockstep::cli {

int selftest(const std::vector<std::string>& arguments) {
  std::optional<int> ranks;
  std::string backend = "auto";
  bool large = false;
  CLI::App app;
  app.add_option("-n", ranks, "Number of ranks to start on this machine (2)");
  std::vector<std::string> backends = backend_names();
  backends.insert(backends.begin(), "auto");
  app.add_option("--backend", backend,
                 "Communication backend; auto: nccl if every rank has a GPU, else shm on one host, "
                 "mpi or gloo on several")
      ->check(one_of(backends))
      ->capture_default_str();
  app.add_flag("--large", large,
               "Also verify operations on more than 2^31 elements (takes about 7 GB for 2 ranks)");
  if (const auto status =
          parse(app, "selftest",
                "Verifies the communication layer: prints versions and hosts, then the result of "
                "each check. The exit status\n"
                "is 1 if a check fails; please report the complete output.\n"
                "Usage: lockstep selftest [OPTIONS]\n"
                "       srun|mpirun|lockstep run ... lockstep selftest [OPTIONS]     "
                "# verify the ranks of the launcher\n",
                arguments))
    return *status;
  std::vector<std::string> command{torch_path(), "selftest", "--backend", backend};
  if (large) command.push_back("--large");
  const RankEnv env = RankEnv::detect();
  if (env.launcher != Launcher::none && backend != "thread") {
    if (ranks)
      throw ConfigError(
          format("selftest: -n {} under {}, which has started the ranks already; leave -n out",
                 *ranks, name_of(env.launcher)));
    become_program(command);
  }
  check_ranks("selftest", ranks.value_or(2));
  return run_program(start_ranks(backend, ranks.value_or(2), command));
}

}  // namespace lockstep::cli
