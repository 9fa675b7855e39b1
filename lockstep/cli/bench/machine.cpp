// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/bench/machine.h"

#include <iostream>

#include "lockstep/cli/bench/collectives.h"
#include "lockstep/cli/common/options.h"
#include "lockstep/cli/common/start_ranks.h"
#include "lockstep/cli/common/torch_program.h"
#include "lockstep/config/plan/cluster_file.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/rank_env.h"

namespace lockstep::cli {

int bench_machine(const std::vector<std::string>& arguments) {
  int ranks = 2;
  std::string backend = "shm", output, dtype = "auto";
  double seconds = 2;
  bool strategies = true;
  CLI::App app;
  app.add_option("-n", ranks, "Ranks")->capture_default_str();
  app.add_option("--backend", backend, "Backend of the collectives")
      ->check(one_of(backend_names()))
      ->capture_default_str();
  app.add_option("--dtype", dtype, "float32 or bfloat16; auto: bfloat16 on GPUs")
      ->check(one_of({"auto", "float32", "bfloat16"}))
      ->capture_default_str();
  app.add_option("--seconds", seconds, "Seconds per measurement, at most; 0: one sample of each")
      ->check(not_negative())
      ->capture_default_str();
  app.add_flag("--strategies,!--no-strategies", strategies,
               "Also record the fastest strategy of collectives for comm.strategy adaptive");
  app.add_option("--output", output, "File [of this host, in the user's cache]");
  const std::string usage =
      "Measures this machine for lockstep plan: products, memory, blocks, the optimizer, "
      "collectives, messages and overlap.\nStarted by a launcher, it measures the machines of the "
      "job.\nUsage: lockstep bench machine [OPTIONS]\n";
  if (const auto status = parse(app, "bench machine", usage, arguments)) return *status;
  check_ranks("bench machine", ranks);
  if (output.empty()) output = config::machine_file();
  const std::vector<std::string> command{
      torch_path(), "bench-machine", "--backend",           backend,    "--dtype",
      dtype,        "--seconds",     format("{}", seconds), "--output", output};
  const bool in_job = RankEnv::detect().world_size > 1;
  const int status = run_program(in_job ? command : start_ranks(backend, ranks, command));
  if (status != 0 || in_job) return status;
  std::cout << config::to_toml(config::read_cluster(output)) << "\nwritten to " << output << "\n";
  if (!strategies || backend == "nccl" || ranks == 1) return 0;
  std::cerr << "strategies of collectives for comm.strategy adaptive\n";
  return bench_collectives({"-n", std::to_string(ranks), "--backends", backend, "--calibrate",
                            "--seconds", format("{}", seconds / 10), "--bytes",
                            "1024,16384,262144,4194304,67108864"});
}

}  // namespace lockstep::cli
