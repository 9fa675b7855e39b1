// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/plan/plan.h"

#include <iostream>

#include "lockstep/cli/plan/verbs.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::cli {

const char* const kPlanHelp =
    "Predicts time and memory of a training run, and finds its layout. Starts no rank and needs no "
    "data.\n"
    "Usage: lockstep plan memory [-n N] [--config FILE.toml|.json] [--section.key VALUE ...]\n"
    "       lockstep plan inventory [--list] [-n N] [--config FILE] [--section.key VALUE ...]\n"
    "       lockstep plan time [--cluster NAME|FILE] [--json] [-n N] [--section.key VALUE ...]\n"
    "       lockstep plan time --rows FILE.csv [--memory] [--estimate] [--cluster NAME|FILE ...]\n"
    "                     [--section.key VALUE ...]\n"
    "       lockstep plan layout -n N [--max-ranks N] [--cluster NAME|FILE] [--json] [--svg FILE]\n"
    "                     [--top N] [--explain \"--section.key VALUE ...\"] [--section.key VALUE "
    "...]\n"
    "       lockstep plan compare RUN_FOLDER [--cluster NAME|FILE] [--json]\n"
    "       lockstep plan cluster NAME|FILE\n"
    "memory: peak memory of each rank during a step, compared with memory.max_per_device. The exit "
    "status is\n"
    "0 if it fits or there is no limit, else 1; then a change of the layout that fits is named. No "
    "GPU is needed to\n"
    "plan for one: --train.device cuda. 1 GB is 2^30 bytes.\n"
    "inventory: the model's tensors by kind, with statistics, and the tier that offloaded data is "
    "placed in.\n"
    "With --list: every tensor with the ranks that own a shard of it, and the process groups by "
    "id.\n"
    "time: the time of a step, split into compute, exposed communication, bubble, optimizer and "
    "host.\n"
    "With --rows: one line for each line of a CSV file, whose header names options of lockstep "
    "train;\n"
    "--memory adds that of rank 0, and --estimate takes closed forms for pipelines in place of "
    "their "
    "simulation.\n"
    "layout: searches the layouts of N ranks, or of at most --max-ranks, for the fastest that fit "
    "in memory.\n"
    "Options that are given are kept; the others are searched. The exit status is 1 if nothing "
    "fits.\n"
    "compare: the predicted and the measured step of a run, in the same parts.\n"
    "cluster: prints the description of a cluster as TOML: a100, h100, h200 or a file. Without "
    "--cluster\n"
    "the file that lockstep bench machine wrote on this host counts, else h100.\n"
    "The options are those of lockstep train. Without -n, the layout determines the number of "
    "ranks.\n";

int plan(const std::vector<std::string>& arguments) {
  if (arguments.empty() || arguments[0] == "--help" || arguments[0] == "-h") {
    (arguments.empty() ? std::cerr : std::cout) << kPlanHelp;
    return arguments.empty() ? 2 : 0;
  }
  const std::vector<std::string> rest(arguments.begin() + 1, arguments.end());
  const bool has_options = arguments[0] != "compare" && arguments[0] != "cluster";
  if (!has_options && rest == std::vector<std::string>{"--help"}) {
    std::cout << kPlanHelp;
    return 0;
  }
  if (arguments[0] == "memory") return plan_memory(rest);
  if (arguments[0] == "inventory") return plan_inventory(rest);
  if (arguments[0] == "time") return plan_time(rest);
  if (arguments[0] == "layout") return plan_layout(rest);
  if (arguments[0] == "compare") return plan_compare(rest);
  if (arguments[0] == "cluster") return plan_cluster(rest);
  throw ConfigError(format(
      "plan: unknown subcommand '{}'; use memory, inventory, time, layout, compare or cluster",
      arguments[0]));
}

}  // namespace lockstep::cli
