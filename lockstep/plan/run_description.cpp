// SPDX-License-Identifier: Apache-2.0
#include "lockstep/plan/run_description.h"

#include <algorithm>
#include <tuple>

namespace lockstep::plan {

std::vector<Stage> stages_of(const Run& run) {
  if (!run.pipeline) return {{.first = 0, .count = run.model.layers.size()}};
  std::vector<Stage> stages;
  size_t first = 0;
  for (const int layers : run.layers_per_stage) {
    stages.push_back({.first = first, .count = static_cast<size_t>(layers)});
    first = stages.back().end();
  }
  return stages;
}

std::vector<std::vector<Stage>> chunks_per_rank(const Run& run,
                                                const schedule::Pipeline& pipeline) {
  const std::vector<Stage> stages = stages_of(run);
  std::vector<std::vector<Stage>> ranks(static_cast<size_t>(pipeline.ranks));
  for (int rank = 0; rank < pipeline.ranks; ++rank) {
    for (int chunk = 0; chunk < pipeline.chunks; ++chunk) {
      const auto stage = static_cast<size_t>(pipeline.stage(rank, chunk));
      ranks[static_cast<size_t>(rank)].push_back(stages[stage]);
    }
  }
  return ranks;
}

std::vector<int> rank_per_layer(const Run& run) {
  std::vector<int> ranks(run.model.layers.size(), 0);
  if (!run.pipeline) return ranks;
  const schedule::Schedule schedule = schedule::generate(*run.pipeline);
  const std::vector<Stage> stages = stages_of(run);
  for (size_t i = 0; i < stages.size(); ++i) {
    const int rank = schedule.place(static_cast<int>(i)).rank;
    for (size_t layer = stages[i].first; layer < stages[i].end(); ++layer) ranks[layer] = rank;
  }
  return ranks;
}

bool has_tied_copy(const Model& model, const Stage& stage) {
  return !model.tied.empty() && stage.end() == model.layers.size() && stage.first > 0;
}

std::vector<std::vector<int>> tensor_owners(const Run& run, const Stage& stage, int tp) {
  std::vector<std::vector<int>> owners;
  if (run.granularity != layout::ShardGranularity::tensors) return owners;
  const auto units_of = [&](size_t layer) -> const std::vector<Unit>& {
    return run.model.kinds[run.model.layers[layer].kind].units[static_cast<size_t>(tp)];
  };
  struct Tensor {
    size_t layer, order, unit, shape;  // order: in the layer
    layout::DealtTensor dealt = {};
  };
  std::vector<Tensor> tensors;
  size_t layer = stage.first, order = 0;
  const auto add = [&](const Unit& unit) {
    for (size_t i = 0; i < unit.shapes.size(); ++i, ++order) {
      Tensor tensor{.layer = layer, .order = order, .unit = owners.size(), .shape = i};
      tensor.dealt = {.elements = layout::numel_of(unit.shapes[i]), .trained = unit.trained};
      if (!unit.places.empty() && unit.places[i] < 0) {
        tensor.dealt.index = run.model.reserved + unit.places[i];
      } else if (!unit.places.empty()) {
        tensor.order = static_cast<size_t>(unit.places[i]);
      }
      tensors.push_back(tensor);
    }
    owners.emplace_back(unit.shapes.size(), layout::kEveryRank);
  };
  for (; layer < stage.end(); ++layer, order = 0) {
    for (const Unit& unit : units_of(layer)) add(unit);
  }
  if (has_tied_copy(run.model, stage)) add(units_of(0).front());
  std::stable_sort(tensors.begin(), tensors.end(), [](const Tensor& a, const Tensor& b) {
    return std::tie(a.layer, a.order) < std::tie(b.layer, b.order);
  });
  std::vector<layout::DealtTensor> dealt;
  for (const Tensor& tensor : tensors) dealt.push_back(tensor.dealt);
  const std::vector<int> found = layout::owners_of_tensors(
      dealt,
      {.world = run.shards, .min_elements = run.min_sharded, .reserved = run.model.reserved});
  for (size_t i = 0; i < tensors.size(); ++i) owners[tensors[i].unit][tensors[i].shape] = found[i];
  return owners;
}

}  // namespace lockstep::plan
