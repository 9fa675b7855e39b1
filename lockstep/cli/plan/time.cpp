// SPDX-License-Identifier: Apache-2.0
// `lockstep plan time`: of one layout, or of many that a file lists.
#include <algorithm>
#include <iostream>
#include <sstream>

#include "lockstep/cli/plan/answer.h"
#include "lockstep/cli/plan/verbs.h"
#include "lockstep/config/plan/cluster_file.h"
#include "lockstep/config/plan/planned_run.h"
#include "lockstep/config/plan/timed_run.h"
#include "lockstep/config/tensor_parallel.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/input_file.h"
#include "lockstep/core/require.h"
#include "lockstep/core/size_text.h"
#include "lockstep/plan/memory.h"

namespace lockstep::cli {
namespace {

using config::TrainConfig;
using Words = std::vector<std::string>;

constexpr uint64_t kMostRowBytes = uint64_t{64} << 20;

Words cells_of(const std::string& line) {
  Words cells;
  std::istringstream stream(line);
  for (std::string cell; std::getline(stream, cell, ',');) cells.push_back(cell);
  return cells;
}

// A row's cells are values of the options that the header names. Lists have spaces between their
// numbers; an empty cell leaves the option alone.
Request request_of(const Request& base, const Words& names, const Words& cells) {
  Request row = base;
  config::Schema schema = config::train_schema(row.config);
  for (size_t i = 0; i < names.size(); ++i) {
    if (i >= cells.size() || cells[i].empty()) continue;
    std::string value = cells[i];
    if (names[i] == "parallel.split") std::ranges::replace(value, ' ', ',');
    schema.set_flag(names[i], value);
  }
  const config::LayoutConfig& parallel = row.config.parallel;
  row.world = static_cast<int>(
      layout::ParallelDims{std::max(1, parallel.dp), parallel.tp, parallel.pp}.world_size() *
      parallel.cp);
  row.config.validate(row.world);
  row.model = row.config.model.resolved(row.config.train.seq_len, row.config.model.vocab);
  config::validate_tensor(row.config, row.model);
  return row;
}

// Of the rank that has the first stage.
std::string memory_cells(const Request& row) {
  const auto ranks = plan::memory_per_rank(config::planned_run(row.config, row.model, row.world));
  const plan::Memory& first = ranks.front();
  return format(",{},{},{},{},{}", first.parameters, first.gradients, first.optimizer,
                first.activations, first.buffers);
}

// CSV: for each row what is wrong with it, or the milliseconds on each cluster.
int time_rows(const std::string& path, const Request& base, bool memory, plan::Pipelined how,
              const std::vector<plan::Cluster>& clusters) {
  std::istringstream file(read_text(path, kMostRowBytes));
  std::string line;
  require(static_cast<bool>(std::getline(file, line)), format("{} is empty", path));
  const Words names = cells_of(line);
  std::string out =
      memory ? "refused,parameters,gradients,optimizer,activations,buffers" : "refused";
  for (size_t i = 0; i < clusters.size(); ++i) out += format(",step_ms_{}", i);
  out += '\n';
  while (std::getline(file, line)) {
    try {
      const Request row = request_of(base, names, cells_of(line));
      require(!row.config.train.fit,
              "train.recompute fit has no rows: give none, selective or full");
      std::string cells = memory ? memory_cells(row) : "";
      const plan::ModelShape shape = config::shape_of(row.model);
      const plan::Layout layout = config::timed_layout(row.config, row.model, row.world);
      for (const plan::Cluster& cluster : clusters)
        cells += format(",{:.6g}", 1e3 * plan::step_time(shape, layout, cluster, how).total());
      out += cells + '\n';
    } catch (const ConfigError& error) {
      std::string what = error.what();
      std::ranges::replace(what, ',', ';');
      out += what + '\n';
    }
  }
  std::cout << out;
  return 0;
}

std::string table_of(const config::Prediction& found, const config::ModelSpec& model,
                     const plan::Cluster& cluster) {
  const double total = found.time.total();
  std::string text = format("step {} ({} to {}: {} %), {:.4g} tokens/s, {:.4g} per device\n",
                            seconds_text(total), seconds_text(total * (1 - cluster.error)),
                            seconds_text(total * (1 + cluster.error)), 100 * cluster.error,
                            found.tokens_per_second(), found.tokens_per_second() / found.world);
  for (const auto& [name, seconds] : parts_of(found.time))
    text +=
        format("  {:<28}{:>12}  {:>5.1f} %\n", name, seconds_text(seconds), 100 * seconds / total);
  const plan::ModelShape shape = config::shape_of(model);
  text += format(
      "MFU {:.1f} %, HFU {:.1f} % (6 FLOP a matrix element, 12 x layers x width x "
      "sequence for attention)\n",
      100 * plan::mfu(shape, found.layout, cluster, total),
      100 * plan::hfu(shape, found.layout, cluster, total));
  text += format("memory {} of {} on rank {}, the largest\n", size_text(found.memory),
                 size_text(static_cast<int64_t>(cluster.device.memory)), found.largest_rank);
  return text;
}

}  // namespace

int plan_time(Words arguments) {
  const bool json = take_switch(arguments, "--json"), memory = take_switch(arguments, "--memory");
  const auto how = take_switch(arguments, "--estimate") ? plan::Pipelined::estimated
                                                        : plan::Pipelined::simulated;
  const Words rows = take_values(arguments, "--rows");
  std::vector<plan::Cluster> clusters;
  for (const std::string& name : take_values(arguments, "--cluster"))
    clusters.push_back(config::find_cluster(name).cluster);
  if (clusters.empty()) clusters.push_back(config::cluster_for("").cluster);
  if (!rows.empty()) {
    const auto base = read_open_request(arguments);
    return base ? time_rows(rows.back(), *base, memory, how, clusters) : 0;
  }
  const auto request = read_request(arguments);
  if (!request) return 0;
  const plan::Cluster& cluster = clusters.back();
  const config::Prediction found =
      config::predict(request->config, request->model, request->world, cluster);
  const auto changes = sensitivity(found, request->model, cluster);
  if (json) {
    Json object = to_json(found, request->model, cluster);
    for (const Sensitivity& each : changes)
      object["sensitivity"].push_back({{"change", each.change}, {"step_percent", 100 * each.part}});
    std::cout << object.dump(2) << "\n";
    return 0;
  }
  std::cout << layout_text(request->config, request->model, request->world) << "\n"
            << format("cluster: {}, {}\n", cluster.name, cluster.note)
            << table_of(found, request->model, cluster);
  for (const Sensitivity& each : changes)
    std::cout << format("with {}: {:+.1f} %\n", each.change, 100 * each.part);
  return 0;
}

int plan_cluster(const Words& arguments) {
  require(arguments.size() == 1, "plan cluster: name one of a100, h100, h200 or a file");
  std::cout << config::to_toml(config::find_cluster(arguments[0]));
  return 0;
}

}  // namespace lockstep::cli
