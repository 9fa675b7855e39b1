// SPDX-License-Identifier: Apache-2.0
// `lockstep plan compare`: what was predicted of a run, and what was measured.
#include <iostream>

#include "lockstep/cli/plan/answer.h"
#include "lockstep/cli/plan/verbs.h"
#include "lockstep/config/plan/cluster_file.h"
#include "lockstep/config/plan/run_metrics.h"
#include "lockstep/config/run_folder.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/require.h"

namespace lockstep::cli {

int plan_compare(std::vector<std::string> arguments) {
  const bool json = take_switch(arguments, "--json");
  const auto names = take_values(arguments, "--cluster");
  require(arguments.size() == 1, "plan compare: name one run folder");
  const std::string& folder = arguments[0];
  require(config::is_run_folder(folder), format("plan compare: {} is no run folder", folder));
  const config::TrainConfig config = config::read_run_config(folder);
  const config::ModelSpec model = config.model.resolved(config.train.seq_len, config.model.vocab);
  const plan::Cluster cluster = config::cluster_for(names.empty() ? "" : names.back()).cluster;
  const config::Prediction found =
      config::predict(config, model, config::ranks_of_run(folder), cluster);
  const config::MeasuredStep measured = config::measured_step(folder);
  const Json predicted = to_json(found, model, cluster);
  const double error = found.time.total() / measured.seconds - 1;
  if (json) {
    Json object{{"predicted", predicted},
                {"measured", {{"step_ms", 1e3 * measured.seconds}, {"steps", measured.steps}}},
                {"error_percent", 100 * error}};
    for (const auto& [name, value] : measured.split_ms) object["measured"]["split"][name] = value;
    std::cout << object.dump(2) << "\n";
    return 0;
  }
  std::cout << short_text(found) << "\n"
            << format("cluster: {}, {}\n", cluster.name, cluster.note)
            << format("{:<20}{:>14}{:>14}\n", "milliseconds", "predicted", "measured");
  for (const auto& [name, value] : predicted["split"].items()) {
    const auto part = measured.split_ms.find(name);
    std::cout << format("{:<20}{:>14.2f}{:>14}\n", name, value.get<double>(),
                        part == measured.split_ms.end() ? "-" : format("{:.2f}", part->second));
  }
  std::cout << format("{:<20}{:>14.2f}{:>14.2f}   {:+.1f} % ({} steps)\n", "step",
                      1e3 * found.time.total(), 1e3 * measured.seconds, 100 * error,
                      measured.steps);
  return 0;
}

}  // namespace lockstep::cli
