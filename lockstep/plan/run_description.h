// SPDX-License-Identifier: Apache-2.0
// A training run as a plan sees it: layers and what they cost, and how ranks share them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/core/dtype.h"
#include "lockstep/layout/box.h"
#include "lockstep/layout/flat_layout.h"
#include "lockstep/layout/offload.h"
#include "lockstep/layout/parallel_config.h"
#include "lockstep/layout/rank_map.h"
#include "lockstep/schedule/schedule.h"

namespace lockstep::plan {

// Bytes that a layer takes in each part of a step. Peaks count what is in use at that time on top
// of what other layers have: with the layer's input in forward, with all that it keeps and the
// gradient of its output in backward.
struct LayerCost {
  int64_t kept = 0;  // from forward to backward, its input included
  int64_t forward_peak = 0, backward_peak = 0;
  int64_t backward_peak_keeping = 0;  // where gradients of parameters stay
  int64_t weights = 0;                // bytes of them
  // Of a backward in two halves: what it has at the end of the first, before anything is released,
  // and what is left for the second.
  int64_t input_peak = 0, input_held = 0, weight_kept = 0;
  int64_t weight_peak = 0, weight_peak_keeping = 0;
  int64_t stored = 0;  // of its input, where tensors go to the disk between forward and backward

  bool operator==(const LayerCost&) const = default;
};

// Parameters that are gathered and reduced together.
struct Unit {
  std::string name = {};
  std::vector<layout::Shape> shapes = {};
  bool embedding = false;  // a table of rows that are looked up: backward does not use its values
  int64_t element = 0;     // bytes of an element; 0: of Run::dtype
  bool trained = true;     // has gradients and optimizer state
  bool sparse = false;     // its gradients are counted by LayerCost::weights
  bool copy = false;       // of parameters that another stage has, with their optimizer state
  // Where each shape stands among the parameters of its layer; below 0: that far before the end of
  // Model::reserved. Empty: in order, after those of the units before it.
  std::vector<int64_t> places = {};

  bool operator==(const Unit&) const = default;
};

// Layers that are alike.
struct LayerKind {
  LayerCost cost = {};
  std::vector<std::vector<Unit>> units = {};  // of each tensor-parallel rank
  int64_t buffers = 0;                        // bytes of the modules' buffers, whole on every rank
};

struct Layer {
  std::string name = {};  // stands before the names of its units
  size_t kind = 0;        // one of Model::kinds
};

struct Model {
  std::vector<LayerKind> kinds = {};
  std::vector<Layer> layers = {};  // first to last
  // The last layer computes with the first unit of the first, too, under this name: where a stage
  // has the one layer and not the other, with a copy. Empty: it does not.
  std::string tied = {};
  int64_t tied_bytes = 0;    // of that table on a rank
  int64_t reserved = 0;      // layout::Deal::reserved
  int64_t stream_bytes = 0;  // of what one layer hands to the next
};

struct Run {
  Model model = {};
  layout::ParallelDims dims = {};
  layout::Order order = layout::Order::pp_fastest;
  layout::ShardingStrategy sharding = layout::ShardingStrategy::no_shard;
  int shards = 1;  // data-parallel ranks that share parameters out among them
  layout::ShardGranularity granularity = layout::ShardGranularity::rows;
  int64_t min_sharded = layout::kMinShardedElements;  // smaller tensors stay whole
  layout::OffloadOptions offload = {.params = false, .grads = false, .optimizer = false};
  std::optional<schedule::ScheduleOptions> pipeline = std::nullopt;
  std::vector<int> layers_per_stage = {};  // with a pipeline
  int64_t micro_batches = 1;               // of a rank in each step
  DType dtype = DType::float32;            // of parameters
  int64_t state_bytes = 8;                 // of the optimizer, for each parameter
  bool reproducible = false;
  bool cuda = false;
};

// Consecutive layers.
struct Stage {
  size_t first = 0, count = 0;
  size_t end() const { return first + count; }
};
// All stages of the model, first to last; one where there is no pipeline.
std::vector<Stage> stages_of(const Run& run);
// The stages of each rank of the pipeline, by chunk.
std::vector<std::vector<Stage>> chunks_per_rank(const Run& run, const schedule::Pipeline& pipeline);
// The rank of the pipeline that has each layer.
std::vector<int> rank_per_layer(const Run& run);

// The stage computes with a copy of a table that the first stage has.
bool has_tied_copy(const Model& model, const Stage& stage);
// With ShardGranularity::tensors, of one tensor-parallel rank: the owner of each shape of each unit
// of the stage's layers, in order, and of the tied copy, if there is one, last. As
// layout::owners_of_tensors says it. Nothing with other granularities.
std::vector<std::vector<int>> tensor_owners(const Run& run, const Stage& stage, int tp);

}  // namespace lockstep::plan
