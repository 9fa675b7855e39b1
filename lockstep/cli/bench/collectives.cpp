// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/bench/collectives.h"

#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>

#include "lockstep/cli/bench/collectives_rank.h"
#include "lockstep/cli/common/options.h"
#include "lockstep/cli/common/start_ranks.h"
#include "lockstep/cli/common/torch_program.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/rank_env.h"
#include "lockstep/layout/parallel_config.h"

namespace lockstep::cli {
namespace {

using Words = std::vector<std::string>;
namespace fs = std::filesystem;

// A file name of this process, removed when done.
class TemporaryFile {
 public:
  TemporaryFile() : path_((fs::temp_directory_path() / "lockstep-XXXXXX").string()) {
    const int fd = mkstemp(path_.data());
    if (fd < 0) throw SystemError("cannot create a temporary file " + path_, errno);
    close(fd);
  }
  ~TemporaryFile() { fs::remove(path_, ignored_); }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  std::error_code ignored_;
};

void print_collectives(const nlohmann::ordered_json& results) {
  std::cout << format("{:<8} {:<13} {:<15} {:<10} {:>12} {:>6} {:>12} {:>12} {:>10} {:>10} {:>8}\n",
                      "backend", "strategy", "op", "memory", "bytes", "ranks", "p50 us", "p99 us",
                      "alg GB/s", "bus GB/s", "to best");
  for (const auto& row : results) {
    std::cout << format(
        "{:<8} {:<13} {:<15} {:<10} {:>12} {:>6} {:>12.2f} {:>12.2f} {:>10.2f} {:>10.2f} "
        "{:>8.2f}\n",
        row["backend"].get<std::string>(), row["strategy"].get<std::string>(),
        row["op"].get<std::string>(), row["memory"].get<std::string>(), row["bytes"].get<int64_t>(),
        row["ranks"].get<int>(), row["p50_us"].get<double>(), row["p99_us"].get<double>(),
        row["algbw_gbs"].get<double>(), row["busbw_gbs"].get<double>(), row["ratio"].get<double>());
  }
}

// Names, separated by commas; "all" is all of them.
Words strategy_names(const Words& given, bool calibrate) {
  Words names;
  for (const auto strategy :
       {layout::CommStrategy::all_reduce, layout::CommStrategy::hierarchical,
        layout::CommStrategy::ring, layout::CommStrategy::tree, layout::CommStrategy::adaptive}) {
    if (!calibrate || strategy != layout::CommStrategy::adaptive)
      names.emplace_back(layout::name_of(strategy));
  }
  if (calibrate || given == Words{"all"}) return names;
  for (const std::string& name : given) layout::parse_comm_strategy(name);
  return given;
}

}  // namespace

int bench_collectives(const Words& arguments) {
  int ranks = 2;
  Words backends{"shm"}, ops{"all_reduce"}, strategies{"all-reduce"};
  std::vector<int64_t> sizes{4096, 65536, 4194304, 67108864};
  double seconds = 0.5;
  bool json = false, calibrate = false;
  CLI::App app;
  const CLI::Option* ranks_option = app.add_option("-n", ranks, "Ranks")->capture_default_str();
  const Words operations(std::begin(kBenchOperations), std::end(kBenchOperations));
  app.add_option("--backends", backends, "Separated by commas")
      ->delimiter(',')
      ->check(one_of(backend_names()))
      ->capture_default_str();
  const CLI::Option* ops_option = app.add_option("--ops", ops, "Separated by commas")
                                      ->delimiter(',')
                                      ->check(one_of(operations))
                                      ->capture_default_str();
  app.add_option("--strategy", strategies,
                 "all, or some of all-reduce (the backend's own), hierarchical, ring, tree and "
                 "adaptive, separated by commas")
      ->delimiter(',')
      ->capture_default_str();
  const CLI::Option* bytes_option =
      app.add_option("--bytes", sizes,
                     "Message sizes: bytes in each rank's buffer, separated by commas")
          ->delimiter(',')
          ->check(whole_number(int64_t{1}, int64_t{1} << 40))
          ->capture_default_str();
  app.add_option("--seconds", seconds, "Seconds per measurement")->capture_default_str();
  app.add_flag("--calibrate", calibrate,
               "Record the fastest strategy for comm.strategy adaptive. Measures all strategies; "
               "by default all operations that have several, from 1 KB to 256 MB");
  app.add_flag("--json", json, "Print one JSON array");
  const std::string usage =
      "Times the collectives of one or more backends on this machine, or, started by a launcher, "
      "of one backend on the\nmachines of the job.\nUsage: lockstep bench collectives [OPTIONS]\n";
  if (const auto status = parse(app, "bench collectives", usage, arguments)) return *status;
  check_ranks("bench collectives", ranks);
  strategies = strategy_names(strategies, calibrate);
  if (calibrate && ops_option->empty())
    ops = {"all_reduce", "reduce_scatter", "all_gather", "broadcast"};
  if (calibrate && bytes_option->empty()) {
    sizes.clear();
    for (int64_t bytes = 1 << 10; bytes <= 256 << 20; bytes *= 4) sizes.push_back(bytes);
  }
  const RankEnv env = RankEnv::detect();
  const bool in_job = env.world_size > 1;
  if (in_job && (backends.size() > 1 || !ranks_option->empty())) {
    throw ConfigError(
        format("bench collectives: this process is already rank {} of a job of {}; leave -n out, "
               "and name one backend with --backends",
               env.rank, env.world_size));
  }

  nlohmann::ordered_json results = nlohmann::ordered_json::array();
  for (const std::string& backend : backends) {
    const TemporaryFile file;
    Words command{torch_path(), "bench-collectives",
                  "--backend",  backend,
                  "--ops",      join(ops, ","),
                  "--bytes",    join(sizes, ","),
                  "--seconds",  std::to_string(seconds),
                  "--strategy", join(strategies, ","),
                  "--output",   file.path()};
    if (calibrate) command.push_back("--calibrate");
    const int status = run_program(in_job ? command : start_ranks(backend, ranks, command));
    if (status != 0 || env.rank != 0) return status;
    for (auto& row : nlohmann::ordered_json::parse(std::ifstream(file.path())))
      results.push_back(row);
  }
  if (json) {
    std::cout << results.dump(2) << "\n";
  } else {
    print_collectives(results);
  }
  return 0;
}

}  // namespace lockstep::cli
