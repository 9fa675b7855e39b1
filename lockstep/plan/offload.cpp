// SPDX-License-Identifier: Apache-2.0
#include "lockstep/plan/offload.h"

#include <algorithm>
#include <array>
#include <utility>

#include "lockstep/config/pipeline.h"
#include "lockstep/core/format.h"
#include "lockstep/core/size_text.h"
#include "lockstep/layout/rank_map.h"
#include "lockstep/plan/modules.h"
#include "lockstep/plan/offload_of_shares.h"

namespace lockstep::plan {
namespace {

using config::ModelSpec;
using config::TrainConfig;
using layout::KindBytes;
using layout::OffloadFlat;
using layout::OffloadPlan;
using layout::Shape;
using layout::Tier;

// The flats that fully_shard makes of one model, for each rank that shares it.
class Flats {
 public:
  Flats(const TrainConfig& config, int world)
      : dtype_(config.train.dtype == config::Precision::bfloat16 ? DType::bfloat16
                                                                 : DType::float32),
        whole_(config.parallel.shard == layout::ShardingStrategy::no_shard),
        of_shares_(static_cast<size_t>(shares_of(config, world))) {}

  struct Kind {
    bool embedding = false;
    bool has_state = true;
  };
  void add(const std::string& name, const std::vector<Shape>& shapes, Kind kind) {
    std::vector<Shape> large;
    for (const Shape& shape : shapes)
      (whole_ || layout::numel_of(shape) >= layout::kMinShardedElements ? large : small_)
          .push_back(shape);
    add_flat(name, large, kind, static_cast<int>(of_shares_.size()));
  }

  std::vector<std::vector<OffloadFlat>> take() {
    add_flat("small", small_, {}, 1);
    if (!small_.empty()) {
      for (auto& flats : of_shares_) flats.back().stays = true;
    }
    return std::move(of_shares_);
  }

 private:
  void add_flat(const std::string& name, const std::vector<Shape>& shapes, Kind kind, int parts) {
    if (shapes.empty()) return;
    const auto element = static_cast<int64_t>(size_of(dtype_));
    const auto line = layout::lay_out(shapes, parts, layout::kFlatAlignment / element);
    for (size_t share = 0; share < of_shares_.size(); ++share) {
      const size_t part = parts == 1 ? 0 : share;
      of_shares_[share].push_back(
          {.name = name,
           .unit = name,
           .param = dtype_,
           .compute = dtype_,
           .reduce = dtype_,
           .grad = dtype_,
           .num_parameters = static_cast<int64_t>(shapes.size()),
           .shard = line.blocks[part].size(),
           .size = line.size,
           .shared = parts > 1,
           .has_state = kind.has_state,
           .tensors = layout::optimized_tensors(shapes, line, static_cast<int>(part),
                                                [&](size_t) { return kind.embedding; })});
    }
  }

  DType dtype_;
  bool whole_;
  std::vector<std::vector<OffloadFlat>> of_shares_;
  std::vector<Shape> small_;
};

std::vector<std::vector<OffloadFlat>> flats_of(const TrainConfig& config, const ModelSpec& model,
                                               const LocalTensors& tensors, const Stage& stage,
                                               int world) {
  Flats flats(config, world);
  if (stage.embedding) {
    flats.add("embed", tensors.embed, {.embedding = true});
    flats.add("positions", tensors.positions, {.embedding = true});
  }
  for (int64_t i = 0; i < stage.blocks; ++i)
    flats.add(format("blocks.{}", stage.first_block + i), tensors.block, {});
  if (stage.head) {
    flats.add("norm", tensors.norm, {});
    if (!model.is_tied()) flats.add("head", tensors.head, {});
    // The state of a tied matrix is with the embedding.
    if (model.is_tied() && !stage.embedding) flats.add("head", tensors.embed, {.has_state = false});
  }
  return flats.take();
}

// Ranks that share parameters have them on the host if one of them does.
void agree(std::vector<OffloadPlan>& shares) {
  if (shares.size() == 1) return;
  std::vector<bool> on_host(shares[0].flats.size(), false);
  for (const OffloadPlan& plan : shares) {
    for (size_t i = 0; i < on_host.size(); ++i)
      on_host[i] = on_host[i] || plan.flats[i].params == Tier::host;
  }
  for (OffloadPlan& plan : shares) layout::move_to_host(plan, on_host);
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
          plain += bytes({.param = state.format.param});
        }
      }
    }
  }
  return {encoded, plain};
}

}  // namespace

std::vector<std::vector<OffloadPlan>> offload_of_shares(const TrainConfig& config,
                                                        const ModelSpec& model,
                                                        const LocalTensors& tensors,
                                                        std::span<const Stage> chunks, int world) {
  const auto options =
      layout::divided(layout::resolved(config.offload, 0, 0), static_cast<int>(chunks.size()));
  const auto machine = layout::offload_machine(options, sizes_of(config, model).kernels.cuda);
  std::vector<std::vector<OffloadPlan>> all(static_cast<size_t>(shares_of(config, world)));
  for (const Stage& stage : chunks) {
    std::vector<OffloadPlan> shares;
    for (auto& flats : flats_of(config, model, tensors, stage, world))
      shares.push_back(layout::plan_offload(std::move(flats), options, machine));
    agree(shares);
    for (size_t i = 0; i < all.size(); ++i) all[i].push_back(std::move(shares[i]));
  }
  return all;
}

std::vector<OffloadPlan> plan_offload(const TrainConfig& config, const ModelSpec& model, int world,
                                      int rank) {
  const auto place = layout::RankMap(config.dims(world)).coordinate_of(rank);
  std::vector<Stage> chunks = stages_of(config, model);
  if (config::is_pipelined(config.parallel)) {
    const std::vector<Stage> stages = std::move(chunks);
    chunks.clear();
    const auto schedule = schedule::generate(config::schedule_options(config, world));
    for (int chunk = 0; chunk < schedule.chunks; ++chunk)
      chunks.push_back(stages[static_cast<size_t>(schedule.stage(place.pp, chunk))]);
  }
  auto shares = offload_of_shares(config, model, local_tensors(model, config.parallel.tp, place.tp),
                                  chunks, world);
  return std::move(shares[static_cast<size_t>(place.dp) % shares.size()]);
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
  text += format("{}: the device has {} with what is being used, of {}; the host budget is {}",
                 layout::name_of(options.strategy), size_text(device.sum() + used),
                 size_text(limit), size_text(budget));
  const auto [encoded, plain] = encoded_and_plain(plans);
  if (encoded < plain) {
    const double ratio = static_cast<double>(encoded) / static_cast<double>(plain);
    text +=
        format(", which holds {} of state as {}",
               size_text(layout::effective_budget(budget, ratio)), layout::name_of(options.codec));
  }
  return text + '\n';
}

}  // namespace lockstep::plan
