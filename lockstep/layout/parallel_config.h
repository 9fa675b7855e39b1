// SPDX-License-Identifier: Apache-2.0
// How a job is spread over its ranks, and what each rank does to fit and to communicate.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "lockstep/core/clock.h"
#include "lockstep/layout/rank_map.h"
#include "lockstep/layout/tensor_plan.h"

namespace lockstep::layout {

// What is done about activations: nothing; selective recomputation; full recomputation; full
// recomputation, and what is still saved goes to disk.
enum class MemoryStrategy { basic, standard, aggressive, extreme };
// all_reduce: the backend's own; hierarchical: inside a host first; adaptive: by message size, from
// a measured table.
enum class CommStrategy { all_reduce, hierarchical, ring, tree, adaptive };
// Order of the pipeline's work: docs/pipeline.md has a section on each. file: read from a file.
enum class PipelineSchedule {
  round_robin,
  sequential,
  gpipe,
  one_f_one_b,
  interleaved,
  looped_bfs,
  zb_h1,
  zb_h2,
  zb_1p,
  zb_v,
  dualpipe_v,
  file,
};
enum class Recompute { none, selective, full };
// What each data-parallel rank keeps of the model's state.
enum class ShardingStrategy {
  no_shard,       // everything: gradients are averaged (DDP)
  full_shard,     // a shard of parameters, gradients and optimizer state; parameters are gathered
                  // for each use (ZeRO-3)
  shard_grad_op,  // the same, but parameters stay gathered from forward to backward (ZeRO-2)
  optimizer,      // a shard of optimizer state only: parameters and gradients are whole (ZeRO-1)
  hybrid_shard    // full_shard inside each part of the ranks, copies across the parts
};

// What ranks that share parameters share out.
enum class ShardGranularity {
  rows,    // ranges of rows of each unit, nearly equal in elements
  tensors  // whole tensors: tensor i of the model belongs to rank i % ranks
};

// Tensors with fewer elements stay whole on every rank, unless FullyShardOptions::min_num_params
// says otherwise.
inline constexpr int64_t kMinShardedElements = 1000;

// The names are those of the values with "-" for "_"; one_f_one_b is "1f1b". Sharding strategies
// are "none", "full", "grad_op", "optimizer" and "hybrid"; granularities "rows" and "tensors".
// Parsing throws ConfigError with the list of names.
std::string_view name_of(MemoryStrategy strategy);
std::string_view name_of(CommStrategy strategy);
std::string_view name_of(PipelineSchedule schedule);
std::string_view name_of(Recompute recompute);
std::string_view name_of(ShardingStrategy strategy);
std::string_view name_of(ShardGranularity granularity);
MemoryStrategy parse_memory_strategy(std::string_view name);
CommStrategy parse_comm_strategy(std::string_view name);
PipelineSchedule parse_pipeline_schedule(std::string_view name);
Recompute parse_recompute(std::string_view name);
ShardingStrategy parse_sharding_strategy(std::string_view name);

// Layers of each stage, first to last: `split` or, where it is empty, equal shares. Nothing unless
// every stage has at least one layer and they have `layers` together; what to say then is the
// caller's business.
std::optional<std::vector<int>> layers_per_stage(int64_t layers, int64_t stages,
                                                 const std::vector<int>& split);

struct ParallelAdvancedConfig {
  Order order = Order::pp_fastest;    // of the ranks
  int num_layers = 0;                 // of the model; 0: as many as parallelize() is given
  std::vector<int> layer_split = {};  // layers of each stage; empty means equal stages
  int chunks = 0;                     // stages of a rank; 0: as few as the schedule allows
  std::optional<CommStrategy> communication = std::nullopt;  // not set: that of the group
  // What of each layer is computed again in backward; not set: the memory strategy decides.
  std::optional<Recompute> gradient_checkpointing = std::nullopt;
  bool sequence_parallel = false;  // tensor-parallel ranks share the sequence too
  // Bytes of tensors; 0: no limit. A limit by default would stop runs on larger machines.
  int64_t max_memory_per_device = 0;
  milliseconds communication_timeout = milliseconds{0};  // 0: that of the group

  bool operator==(const ParallelAdvancedConfig&) const = default;
};

// A value, the same on every rank. parallel::parallelize() applies all of it to a model.
struct ParallelConfig {
  ParallelDims dims = {};
  int micro_batch_size = 1;   // rows that are computed at a time
  int global_batch_size = 0;  // rows of a step, of all ranks; 0: micro_batch_size x dp
  MemoryStrategy memory = MemoryStrategy::standard;
  ShardingStrategy sharding = ShardingStrategy::no_shard;
  bool mixed_precision = false;  // compute in bfloat16, with float32 weights and sums
  PipelineSchedule schedule = PipelineSchedule::interleaved;  // where pp > 1
  TensorPlan tensor_plan = {};                                // how the ranks of tp share matrices
  ParallelAdvancedConfig advanced = {};

  // What the memory strategy and the switch amount to: a switch that is set wins.
  Recompute recompute() const;
  bool activations_to_disk() const { return memory == MemoryStrategy::extreme; }
  // Of one data-parallel rank in a step.
  int microbatches() const;
  // Stages of a rank: 1 where pp is 1.
  int chunks() const;
  // One entry for each stage of a model of so many layers. ConfigError, with what would divide.
  std::vector<int> layers_per_stage(int64_t layers) const;

  // Throws ConfigError for the first rule that is broken, with the numbers.
  void validate(int world_size) const;

  bool operator==(const ParallelConfig&) const = default;
};

}  // namespace lockstep::layout
