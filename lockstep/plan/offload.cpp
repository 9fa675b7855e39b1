// SPDX-License-Identifier: Apache-2.0
#include "lockstep/plan/offload.h"

#include <algorithm>
#include <array>
#include <utility>

#include "lockstep/core/format.h"
#include "lockstep/core/size_text.h"
#include "lockstep/layout/rank_map.h"
#include "lockstep/plan/offload_of_shards.h"

namespace lockstep::plan {
namespace {

using layout::KindBytes;
using layout::OffloadFlat;
using layout::OffloadPlan;
using layout::Shape;
using layout::Tier;

// The flats that fully_shard makes of one model, for each rank that shares it.
class Flats {
 public:
  explicit Flats(const Run& run)
      : dtype_(run.dtype),
        whole_(run.sharding == layout::ShardingStrategy::no_shard),
        min_sharded_(run.min_sharded),
        of_shards_(static_cast<size_t>(run.shards)) {}

  struct Kind {
    bool embedding = false;
    bool has_state = true;
    bool trained = true;
  };
  // `owners` are those of tensor_owners(); none where ranks share rows.
  void add(const std::string& name, const std::vector<Shape>& shapes,
           const std::vector<int>& owners, Kind kind) {
    std::vector<Shape> large;
    std::vector<int> of_large;
    for (const size_t i : layout::order_of_tensors(shapes.size(), owners)) {
      const bool is_large = whole_ || layout::numel_of(shapes[i]) >= min_sharded_;
      (is_large ? large : kind.trained ? small_ : small_frozen_).push_back(shapes[i]);
      if (is_large && !owners.empty()) of_large.push_back(owners[i]);
    }
    add_flat(name, large, of_large, kind, static_cast<int>(of_shards_.size()));
  }

  std::vector<std::vector<OffloadFlat>> take() {
    const auto add_small = [&](const std::vector<Shape>& shapes, Kind kind) {
      add_flat("small", shapes, {}, kind, 1);
      if (shapes.empty()) return;
      for (auto& flats : of_shards_) flats.back().stays = true;
    };
    add_small(small_, {});
    add_small(small_frozen_, {.has_state = false, .trained = false});
    return std::move(of_shards_);
  }

 private:
  void add_flat(const std::string& name, const std::vector<Shape>& shapes,
                const std::vector<int>& owners, Kind kind, int parts) {
    if (shapes.empty()) return;
    const auto element = static_cast<int64_t>(size_of(dtype_));
    const auto line = layout::lay_out(shapes, owners, parts, layout::kFlatAlignment / element);
    for (size_t shard = 0; shard < of_shards_.size(); ++shard) {
      const size_t part = parts == 1 ? 0 : shard;
      of_shards_[shard].push_back({.name = name,
                                   .unit = name,
                                   .param = dtype_,
                                   .compute = dtype_,
                                   .reduce = dtype_,
                                   .grad = dtype_,
                                   .num_parameters = static_cast<int64_t>(shapes.size()),
                                   .shard = line.blocks[part].size(),
                                   .size = line.size,
                                   .shared = parts > 1,
                                   .trained = kind.trained,
                                   .has_state = kind.has_state});
      if (!kind.trained) continue;
      of_shards_[shard].back().tensors = layout::optimized_tensors(
          shapes, line, static_cast<int>(part), [&](size_t) { return kind.embedding; });
    }
  }

  DType dtype_;
  bool whole_;
  int64_t min_sharded_;
  std::vector<std::vector<OffloadFlat>> of_shards_;
  std::vector<Shape> small_, small_frozen_;
};

std::vector<std::vector<OffloadFlat>> flats_of(const Run& run, const Stage& stage, int tp) {
  const Model& model = run.model;
  const auto units_of_layer = [&](size_t layer) -> const std::vector<Unit>& {
    return model.kinds[model.layers[layer].kind].units[static_cast<size_t>(tp)];
  };
  const std::vector<std::vector<int>> owners = tensor_owners(run, stage, tp);
  size_t unit_index = 0;
  const auto next_owners = [&] {
    return owners.empty() ? std::vector<int>() : owners[unit_index++];
  };
  Flats flats(run);
  for (size_t i = stage.first; i < stage.end(); ++i) {
    for (const Unit& unit : units_of_layer(i))
      flats.add(model.layers[i].name + unit.name, unit.shapes, next_owners(),
                {.embedding = unit.embedding,
                 .has_state = unit.trained && !unit.copy,
                 .trained = unit.trained});
  }
  // The state of a tied matrix is with the embedding.
  if (has_tied_copy(model, stage))
    flats.add(model.tied, units_of_layer(0).front().shapes, next_owners(),
              {.has_state = false, .trained = units_of_layer(0).front().trained});
  return flats.take();
}

// Ranks that share parameters have them on the host if one of them does.
void agree(std::vector<OffloadPlan>& shards) {
  if (shards.size() == 1) return;
  std::vector<bool> on_host(shards[0].flats.size(), false);
  for (const OffloadPlan& plan : shards) {
    for (size_t i = 0; i < on_host.size(); ++i)
      on_host[i] = on_host[i] || plan.flats[i].params == Tier::host;
  }
  for (OffloadPlan& plan : shards) layout::move_to_host(plan, on_host);
}

// Bytes of the state of all slices, as it is kept and as it would be without codecs.
std::pair<int64_t, int64_t> encoded_and_plain(std::span<const OffloadPlan> plans) {
  int64_t encoded = 0, plain = 0;
  for (const OffloadPlan& plan : plans) {
    for (const OffloadPlan::Flat& flat : plan.flats) {
      for (const layout::StatePlan& state : flat.states) {
        for (const layout::StateSlice& slice : state.slices) {
          const auto bytes = [&](const codec::PackedFormat& form) {
            return static_cast<int64_t>(codec::packed_layout(form, slice.count).total);
          };
          encoded += bytes(state.format);
          plain += bytes({.param = state.format.param, .moments = state.format.moments});
        }
      }
    }
  }
  return {encoded, plain};
}

}  // namespace

std::vector<std::vector<OffloadPlan>> offload_of_shards(const Run& run,
                                                        std::span<const Stage> chunks, int tp) {
  const auto options =
      layout::divided(layout::resolved(run.offload, 0, 0), static_cast<int>(chunks.size()));
  const auto machine = layout::offload_machine(options, run.cuda);
  std::vector<std::vector<OffloadPlan>> all(static_cast<size_t>(run.shards));
  for (const Stage& stage : chunks) {
    std::vector<OffloadPlan> shards;
    for (auto& flats : flats_of(run, stage, tp))
      shards.push_back(layout::plan_offload(std::move(flats), options, machine));
    agree(shards);
    for (size_t i = 0; i < all.size(); ++i) all[i].push_back(std::move(shards[i]));
  }
  return all;
}

std::vector<OffloadPlan> plan_offload(const Run& run, int rank) {
  const auto place = layout::RankMap(run.dims, run.order).coordinate_of(rank);
  const std::vector<Stage> chunks =
      run.pipeline
          ? chunks_per_rank(run, schedule::generate(*run.pipeline))[static_cast<size_t>(place.pp)]
          : stages_of(run);
  auto shards = offload_of_shards(run, chunks, place.tp);
  return std::move(shards[static_cast<size_t>(place.dp) % shards.size()]);
}

std::string to_text(std::span<const OffloadPlan> plans) {
  KindBytes device, host;
  int64_t disk = 0, used = 0, limit = 0, budget = 0;
  for (const OffloadPlan& plan : plans) {
    device += plan.resting;
    host += plan.on_host;
    disk += plan.on_disk;
    used += plan.used.sum();
    limit += plan.options.device_limit;
    budget += plan.options.host_budget;
  }
  const std::array<std::array<std::string, 5>, 4> lines{{
      {"offload", "parameters", "gradients", "optimizer", "total"},
      {"device", size_text(device.params), size_text(device.grads), size_text(device.states),
       size_text(device.sum())},
      {"host", size_text(host.params), size_text(host.grads), size_text(host.states),
       size_text(host.sum())},
      {"disk", size_text(0), size_text(0), size_text(disk), size_text(disk)},
  }};
  std::string text;
  for (const auto& line : lines) {
    text += format("{:<8}", line[0]);
    for (size_t i = 1; i < line.size(); ++i) text += format("  {:>10}", line[i]);
    text += '\n';
  }
  const layout::OffloadOptions& options = plans[0].options;
  text += format(
      "{}, before the first step: the device has {} with what is being used, of {}; the host "
      "budget "
      "is {}",
      layout::name_of(options.advanced.strategy), size_text(device.sum() + used), size_text(limit),
      size_text(budget));
  const auto [encoded, plain] = encoded_and_plain(plans);
  if (encoded < plain) {
    const double ratio = static_cast<double>(encoded) / static_cast<double>(plain);
    const layout::StateCodecs moments{.exp_avg = options.codec.exp_avg,
                                      .exp_avg_sq = options.codec.exp_avg_sq};
    text += format(", which holds {} of state as {}",
                   size_text(layout::effective_budget(budget, ratio)), layout::name_of(moments));
  }
  const layout::StateCodecs others{.params = options.codec.params, .grads = options.codec.grads};
  if (others != layout::StateCodecs{}) text += format("; on the host {}", layout::name_of(others));
  return text + '\n';
}

}  // namespace lockstep::plan
