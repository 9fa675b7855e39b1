// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/run.h"

#include "lockstep/cli/common/options.h"
#include "lockstep/cli/common/torch_program.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/rank_env.h"
#include "lockstep/launch/launcher.h"

namespace lockstep::cli {
namespace {

constexpr const char* kBounds = "N|MIN:MAX";

// Everything from the first word that is not an option, or from "--" on, is the program's.
std::vector<std::string> program_of(CLI::App& app) {
  std::vector<std::string> words = app.remaining();
  if (!words.empty() && words.front() == "--") {
    words.erase(words.begin());
  } else if (!words.empty() && words.front().size() > 1 && words.front().front() == '-') {
    throw ConfigError("run: unknown option " + words.front() +
                      "; lockstep run --help lists the options, and they come before the program");
  }
  return words;
}

// mpirun calls it -np, which would be -n with the value "p". Every option has one value.
std::vector<std::string> without_np(std::vector<std::string> arguments) {
  for (size_t i = 0; i < arguments.size() && arguments[i].starts_with('-');) {
    std::string& word = arguments[i];
    if (word == "--") break;
    if (word == "-np") word = "-n";
    const bool has_value =
        word.find('=') != std::string::npos || (word.size() > 2 && !word.starts_with("--"));  // -n4
    i += has_value ? 1 : 2;
  }
  return arguments;
}

// Each copy would start a job of its own, and all of them would do the same work.
void refuse_copies(int nodes) {
  if (nodes > 1) return;
  const RankEnv env = RankEnv::detect();
  if (env.world_size == 1) return;
  const std::string launcher =
      env.launcher == Launcher::lockstep ? "lockstep run" : std::string(name_of(env.launcher));
  throw ConfigError(
      format("run: {} has started {} copies of lockstep run, of which this is number {}; start one "
             "per node with --nnodes, or start the program directly under {}",
             launcher, env.world_size, env.rank, launcher));
}

}  // namespace

int run(const std::vector<std::string>& arguments) {
  launch::LaunchOptions options;
  int grace = static_cast<int>(options.grace.count());
  int meet_seconds = static_cast<int>(options.meet_time.count() / 1000);
  int stop_grace = static_cast<int>(options.stop_grace.count());

  CLI::App app;
  app.prefix_command();
  std::string ranks, nodes = "1";
  auto grow_after = static_cast<int>(options.grow_after.count());
  app.add_option(
         "-n,--nproc-per-node", ranks,
         "Number of ranks on this node. MIN:MAX: start MAX, and continue with as few as MIN "
         "after ranks have failed")
      ->type_name(kBounds)
      ->required();
  app.add_option(
         "--nnodes", nodes,
         "Number of nodes in the job; start lockstep run on each of them. MIN:MAX: continue "
         "with as few as MIN after nodes were lost")
      ->type_name(kBounds)
      ->capture_default_str();
  app.add_option("--node-rank", options.node_rank, "Index of this node, from 0")
      ->capture_default_str();
  app.add_option("--rendezvous", options.rendezvous,
                 "HOST:PORT of the rendezvous on node 0 (one node: a free port on 127.0.0.1)");
  app.add_option("--rendezvous-timeout", meet_seconds,
                 "Seconds to wait for all nodes at the rendezvous")
      ->capture_default_str();
  app.add_option("--interface", options.interface,
                 "Network interface for traffic between hosts, such as eth1 (or set "
                 "LOCKSTEP_INTERFACE); default: the interface with a route to node 0");
  app.add_option("--token-file", options.token_file,
                 "File with the job's secret, the same on all nodes (or set LOCKSTEP_TOKEN)");
  app.add_option("--max-restarts", options.max_restarts,
                 "Number of times in an hour to restart all ranks after a rank has failed")
      ->capture_default_str();
  app.add_option("--grow-after", grow_after,
                 "Seconds until a place that has failed is used again, with MIN:MAX; doubled each "
                 "time that it fails")
      ->capture_default_str();
  app.add_option("--log-dir", options.log_dir,
                 "Also write each rank's output to DIR/attempt_<k>/rank<r>/{stdout,stderr}.log; k "
                 "counts on from earlier runs in DIR");
  app.add_option("--hang-rank", options.hang_rank,
                 "Rank that waits for a debugger before it starts");
  app.add_option("--grace", grace,
                 "Milliseconds between a rank's death and SIGTERM to the other ranks, and between "
                 "SIGTERM and SIGKILL")
      ->capture_default_str();
  app.add_option("--stop-grace", stop_grace,
                 "Milliseconds between SIGINT or SIGTERM to the launcher and SIGKILL to the ranks")
      ->capture_default_str();
  if (const auto status =
          parse(app, "run",
                "Starts N ranks of a program and stops all of them when one fails.\n"
                "Usage: lockstep run -n N [OPTIONS] PROGRAM [ARGS...]\n",
                without_np(arguments)))
    return *status;
  const launch::Bounds local = launch::parse_bounds(ranks, "-n");
  options.ranks = local.max;
  options.min_ranks = local.is_elastic() ? local.min : 0;
  const launch::Bounds all = launch::parse_bounds(nodes, "--nnodes");
  options.nodes = all.max;
  options.min_nodes = all.is_elastic() ? all.min : 0;
  refuse_copies(options.nodes);
  options.grow_after = std::chrono::seconds{grow_after};
  options.meet_time = std::chrono::seconds{meet_seconds};
  options.grace = milliseconds{grace};
  options.stop_grace = milliseconds{stop_grace};
  options.command = program_of(app);
  options.forks = !options.command.empty() && is_torch_program(options.command.front());
  return launch::run(options);
}

}  // namespace lockstep::cli
