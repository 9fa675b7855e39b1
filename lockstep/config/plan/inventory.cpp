// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/plan/inventory.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "lockstep/config/freeze.h"
#include "lockstep/config/plan/planned_run.h"
#include "lockstep/config/tensor_parallel.h"
#include "lockstep/core/format.h"
#include "lockstep/core/size_text.h"
#include "lockstep/layout/flat_layout.h"
#include "lockstep/layout/rank_map.h"
#include "lockstep/plan/report.h"

namespace lockstep::config {
namespace {

// A parameter of the model itself, whose name has no dot, is a kind of its own.
std::string kind_of(const std::string& name) {
  const size_t dot = name.rfind('.');
  const std::string last = dot == std::string::npos ? name : name.substr(dot + 1);
  std::string module = name.substr(0, dot);
  if (module.find("norm") != std::string::npos) return "norms";
  if (last == "bias") return "biases";
  // "blocks.7.mlp.up": the number does not matter.
  const std::string blocks = "blocks.";
  if (!module.starts_with(blocks)) return module;
  const size_t end = module.find('.', blocks.size());
  return end == std::string::npos ? "blocks" : blocks + module.substr(end + 1);
}

// What is gathered and reduced together (train/model_options.cpp): a block, an embedding, a head,
// and what is in none of these.
std::string unit_of(const std::string& name) {
  const std::string first = name.substr(0, name.find('.'));
  if (first == "blocks") return name.substr(0, name.find('.', first.size() + 1));
  return first == "embed" || first == "positions" || first == "head" ? first : "";
}

// The layer that a unit is in. A tied head is a copy of what the first one owns.
size_t layer_of(const std::string& unit, const plan::Model& model) {
  if (unit == "embed" || unit == "positions") return 0;
  const auto found = std::ranges::find(model.layers, unit, &plan::Layer::name);
  return unit.starts_with("blocks.") ? static_cast<size_t>(found - model.layers.begin())
                                     : model.layers.size() - 1;  // norm, head
}

std::vector<int> all_parts(int shards) {
  std::vector<int> all(static_cast<size_t>(shards));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

// Which of the ranks that share a unit have some of each of its tensors, where they share rows.
std::vector<std::vector<int>> parts_of(const std::vector<layout::Shape>& shapes, bool whole,
                                       int shards, int64_t element_bytes) {
  std::vector<std::vector<int>> parts(shapes.size(), all_parts(shards));
  std::vector<layout::Shape> large;
  std::vector<size_t> index;
  for (size_t i = 0; i < shapes.size(); ++i) {
    if (whole || layout::numel_of(shapes[i]) < layout::kMinShardedElements) continue;
    large.push_back(shapes[i]);
    index.push_back(i);
    parts[i].clear();
  }
  if (large.empty()) return parts;
  const auto line = layout::lay_out(large, shards, layout::kFlatAlignment / element_bytes);
  for (int part = 0; part < shards; ++part) {
    for (const layout::RowShard& rows : line.rows[static_cast<size_t>(part)])
      parts[index[static_cast<size_t>(rows.tensor)]].push_back(part);
  }
  return parts;
}

// The same for all tensors of the model, in order, where ranks share whole tensors. Layers have
// their tensors in the order of the model.
std::vector<std::vector<int>> parts_of_tensors(const plan::Run& run, int tp) {
  std::vector<std::vector<int>> parts;
  for (const plan::Stage& stage : plan::stages_of(run)) {
    const auto owners = plan::tensor_owners(run, stage, tp);
    size_t next = 0;
    for (size_t layer = stage.first; layer < stage.end(); ++layer) {
      std::map<int64_t, std::vector<int>> of_layer;  // by place in it
      int64_t place = 0;
      for (const plan::Unit& unit :
           run.model.kinds[run.model.layers[layer].kind].units[static_cast<size_t>(tp)]) {
        const std::vector<int>& of_unit = owners[next++];
        for (size_t i = 0; i < of_unit.size(); ++i, ++place) {
          const bool given = !unit.places.empty() && unit.places[i] >= 0;
          of_layer[given ? unit.places[i] : place] =
              of_unit[i] == layout::kEveryRank ? all_parts(run.shards) : std::vector{of_unit[i]};
        }
      }
      for (auto& [at, ranks] : of_layer) parts.push_back(std::move(ranks));
    }
  }
  return parts;
}

// Columns as wide as they must be; numbers to the right, but for the first `left`.
std::string table(const std::vector<std::vector<std::string>>& lines, size_t left) {
  std::vector<size_t> widths(lines[0].size(), 0);
  for (const auto& line : lines) {
    for (size_t i = 0; i < line.size(); ++i) widths[i] = std::max(widths[i], line[i].size());
  }
  std::string text;
  for (const auto& line : lines) {
    for (size_t i = 0; i < line.size(); ++i) {
      if (i > 0) text += "  ";
      text +=
          i < left ? format("{:<{}}", line[i], widths[i]) : format("{:>{}}", line[i], widths[i]);
    }
    text += '\n';
  }
  return text;
}

std::vector<std::string> line_of(const std::string& name, const layout::ParameterStatistics& all) {
  return {name,
          format("{}", all.count),
          format("{}", all.elements),
          format("{:.0f}", all.mean),
          format("{:.0f}", all.median),
          format("{}", all.min),
          format("{}", all.max),
          size_text(all.bytes)};
}

}  // namespace

layout::ModelParameters model_parameters(std::span<const TensorSpec> tensors,
                                         int64_t element_bytes) {
  layout::ModelParameters all;
  for (const TensorSpec& tensor : tensors) all.add(tensor.name, tensor.shape, element_bytes);
  return all;
}

std::vector<InventoryKind> inventory_of(std::span<const TensorSpec> tensors,
                                        int64_t element_bytes) {
  std::vector<std::string> names;
  std::vector<layout::ModelParameters> kinds;
  for (const TensorSpec& tensor : tensors) {
    const std::string kind = kind_of(tensor.name);
    const auto at = static_cast<size_t>(std::ranges::find(names, kind) - names.begin());
    if (at == names.size()) {
      names.push_back(kind);
      kinds.emplace_back();
    }
    kinds[at].add(tensor.name, tensor.shape, element_bytes);
  }
  std::vector<InventoryKind> counted;
  for (size_t i = 0; i < names.size(); ++i) counted.push_back({names[i], kinds[i].statistics()});
  return counted;
}

std::string inventory_table(std::span<const TensorSpec> tensors, int64_t element_bytes) {
  std::vector<std::vector<std::string>> lines{
      {"kind", "tensors", "elements", "mean", "median", "min", "max", "bytes"}};
  for (const auto& [name, statistics] : inventory_of(tensors, element_bytes))
    lines.push_back(line_of(name, statistics));
  lines.push_back(line_of("all", model_parameters(tensors, element_bytes).statistics()));
  return table(lines, 1);
}

std::vector<std::vector<size_t>> owners_of(const TrainConfig& config, const ModelSpec& model,
                                           int world) {
  const auto tensors = model.tensors();
  const plan::Run run = planned_run(config, model, world);
  const layout::RankMap map(run.dims, run.order);
  const std::vector<int> stage_ranks = plan::rank_per_layer(run);
  const int shards = run.shards, tp = run.dims.tp;
  const bool whole = run.sharding == layout::ShardingStrategy::no_shard;
  // Frozen parameters of a unit are laid out apart from those that are trained.
  const std::set<std::string> frozen = frozen_tensors(config, model);
  std::map<std::pair<std::string, bool>, std::vector<size_t>> units;
  for (size_t i = 0; i < tensors.size(); ++i)
    units[{unit_of(tensors[i].name), frozen.contains(tensors[i].name)}].push_back(i);
  std::vector<std::vector<size_t>> owners(tensors.size());
  const bool by_tensors = run.granularity == layout::ShardGranularity::tensors;
  std::vector<std::vector<std::vector<int>>> parts_of_columns(static_cast<size_t>(tp));
  for (int column = 0; by_tensors && column < tp; ++column)
    parts_of_columns[static_cast<size_t>(column)] = parts_of_tensors(run, column);
  for (const auto& [unit, members] : units) {
    const int pp = stage_ranks[layer_of(unit.first, run.model)];
    for (int column = 0; column < tp; ++column) {
      std::vector<layout::Shape> shapes;
      for (const size_t i : members)
        shapes.push_back(tensor_split(model, tensors[i], tp, column).local_shape());
      auto parts = parts_of(shapes, whole || by_tensors, shards, element_bytes_of(config));
      for (size_t k = 0; k < members.size(); ++k) {
        if (by_tensors) parts[k] = parts_of_columns[static_cast<size_t>(column)].at(members[k]);
        for (const int part : parts[k]) {
          for (int dp = part; dp < run.dims.dp; dp += shards)
            owners[members[k]].push_back(
                static_cast<size_t>(map.rank_at({.dp = dp, .tp = column, .pp = pp})));
        }
      }
    }
  }
  for (auto& ranks : owners) std::ranges::sort(ranks);
  return owners;
}

std::string tensor_list(const TrainConfig& config, const ModelSpec& model, int world) {
  const auto tensors = model.tensors();
  const auto owners = owners_of(config, model, world);
  std::vector<std::vector<std::string>> lines{{"tensor", "shape", "bytes", "owners"}};
  for (size_t i = 0; i < tensors.size(); ++i) {
    lines.push_back({tensors[i].name, layout::describe(tensors[i].shape),
                     size_text(layout::numel_of(tensors[i].shape) * element_bytes_of(config)),
                     plan::rank_ranges(owners[i])});
  }
  return table(lines, 2);
}

std::string group_list(const TrainConfig& config, int world) {
  std::vector<std::vector<std::string>> lines{{"group", "ranks"}};
  const layout::RankMap map(config.dims(world), config.parallel.order);
  for (const layout::RankMap::NamedGroup& group : map.named_groups()) {
    if (group.members.size() > 1) lines.push_back({group.id, join(group.members)});
  }
  return lines.size() > 1 ? table(lines, 2) : "";
}

}  // namespace lockstep::config
