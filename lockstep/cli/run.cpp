// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/run.h"

#include "lockstep/cli/common/options.h"
#include "lockstep/core/error.h"
#include "lockstep/launch/launcher.h"

namespace lockstep::cli {
namespace {

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

}  // namespace

int run(const std::vector<std::string>& arguments) {
  launch::LaunchOptions options;
  int grace = static_cast<int>(options.grace.count());
  int meet_seconds = static_cast<int>(options.meet_time.count() / 1000);
  int stop_grace = static_cast<int>(options.stop_grace.count());

  CLI::App app;
  app.prefix_command();
  app.add_option("-n,--nproc-per-node", options.ranks, "Ranks on this node")->required();
  app.add_option("--nnodes", options.nodes, "Nodes in the job; start lockstep run on each")
      ->capture_default_str();
  app.add_option("--node-rank", options.node_rank, "Which of the nodes this is, from 0")
      ->capture_default_str();
  app.add_option("--rendezvous", options.rendezvous,
                 "HOST:PORT of node 0 where the nodes meet (one node: a free port on 127.0.0.1)");
  app.add_option("--rendezvous-timeout", meet_seconds, "Seconds that the nodes wait for each other")
      ->capture_default_str();
  app.add_option(
      "--interface", options.interface,
      "Network interface that hosts talk over, such as eth1 (or set LOCKSTEP_INTERFACE); "
      "the one that reaches node 0 if none is named");
  app.add_option("--token-file", options.token_file,
                 "File with the job's secret, the same on all nodes (or set LOCKSTEP_TOKEN)");
  app.add_option("--max-restarts", options.max_restarts,
                 "How often all ranks are started again after one failed")
      ->capture_default_str();
  app.add_option("--log-dir", options.log_dir,
                 "Keep output in DIR/attempt_<k>/rank<r>/{stdout,stderr}.log too");
  app.add_option("--hang-rank", options.hang_rank,
                 "This rank waits for a debugger before it starts");
  app.add_option(
         "--grace", grace,
         "Milliseconds from a rank's death to SIGTERM for the others, and from there to SIGKILL")
      ->capture_default_str();
  app.add_option("--stop-grace", stop_grace,
                 "Milliseconds from a SIGINT or SIGTERM for the launcher to SIGKILL for the ranks")
      ->capture_default_str();
  if (const auto status = parse(app, "run",
                                "Starts N ranks of a program and ends them together.\n"
                                "Usage: lockstep run -n N [OPTIONS] PROGRAM [ARGS...]\n",
                                arguments))
    return *status;
  options.meet_time = std::chrono::seconds{meet_seconds};
  options.grace = milliseconds{grace};
  options.stop_grace = milliseconds{stop_grace};
  options.command = program_of(app);
  return launch::run(options);
}

}  // namespace lockstep::cli
