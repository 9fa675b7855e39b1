// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/pipeline_choice.h"

#include "lockstep/config/tensor_parallel.h"

#include <cmath>
#include <numeric>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/require.h"

namespace lockstep::config {
namespace {

using layout::PipelineSchedule;

}  // namespace

bool is_pipelined(const LayoutConfig& parallel) { return parallel.pp > 1; }

schedule::ScheduleOptions schedule_options(const TrainConfig& config, int world) {
  const LayoutConfig& parallel = config.parallel;
  return {.kind = parallel.schedule.value_or(parallel.chunks > 1 ? PipelineSchedule::interleaved
                                                                 : PipelineSchedule::one_f_one_b),
          .ranks = parallel.pp,
          .microbatches = config.accumulation(world),
          .chunks = parallel.chunks,
          .group = parallel.group,
          .file = parallel.schedule_file};
}

layout::ParallelConfig parallel_config(const TrainConfig& config, int world) {
  const LayoutConfig& parallel = config.parallel;
  const schedule::ScheduleOptions schedule = schedule_options(config, world);
  return {.dims = config.dims(world),
          .micro_batch_size = static_cast<int>(config.train.micro_batch),
          // Rows that are computed, padding too. Ranks that share a row count it once each.
          .global_batch_size = static_cast<int>(config.train.micro_batch) *
                               config.accumulation(world) * config.dims(world).dp,
          .memory = config.memory.strategy,
          .sharding = parallel.shard,
          .schedule = schedule.kind,
          .tensor_plan = tensor_plan(config.model),
          .advanced = {.order = parallel.order,
                       .num_layers = static_cast<int>(config.model.layers) + 2,
                       .layer_split = layers_per_stage(parallel, config.model.layers),
                       .chunks = parallel.pp > 1 ? parallel.chunks : 0,
                       .gradient_checkpointing = config.recompute(),
                       .sequence_parallel = parallel.sequence_parallel,
                       .max_memory_per_device = config.memory.max_per_device}};
}

std::vector<int> layers_per_stage(const LayoutConfig& parallel, int64_t blocks) {
  const int64_t stages = int64_t{parallel.pp} * parallel.chunks;
  const std::string how = parallel.chunks > 1 ? format("parallel.pp {} x parallel.chunks {} = {}",
                                                       parallel.pp, parallel.chunks, stages)
                                              : format("parallel.pp {}", parallel.pp);
  if (parallel.split.empty()) {
    auto layers = layout::layers_per_stage(blocks, stages, {});
    require(layers.has_value(),
            format("model.layers is {}, must be a multiple of the stages, {}; or give "
                   "parallel.split, the layers of each, in which embeddings and head count as one "
                   "each",
                   blocks, how));
    ++layers->front();
    ++layers->back();
    return *layers;
  }
  const std::vector<int> split(parallel.split.begin(), parallel.split.end());
  const auto layers = layout::layers_per_stage(blocks + 2, stages, split);
  require(layers.has_value(),
          format("parallel.split is {}: {} stages with {} layers, must be {} stages ({}) with {} "
                 "layers: model.layers {}, embeddings and head",
                 join(split), split.size(), std::accumulate(split.begin(), split.end(), int64_t{0}),
                 stages, how, blocks + 2, blocks));
  return *layers;
}

void validate_pipeline(const TrainConfig& config, int world) {
  const LayoutConfig& parallel = config.parallel;
  const auto only_with_stages = [&](bool given, const std::string& what) {
    require(!given || parallel.pp > 1, format("{}, but parallel.pp is 1: leave it out", what));
  };
  only_with_stages(parallel.schedule.has_value(),
                   format("parallel.schedule is {}",
                          parallel.schedule ? layout::name_of(*parallel.schedule) : ""));
  only_with_stages(parallel.chunks > 1, format("parallel.chunks is {}", parallel.chunks));
  only_with_stages(parallel.group > 0, format("parallel.group is {}", parallel.group));
  only_with_stages(!parallel.split.empty(),
                   format("parallel.split has {} numbers", parallel.split.size()));
  only_with_stages(!parallel.schedule_file.empty(),
                   format("parallel.schedule_file is {}", parallel.schedule_file));
  if (!is_pipelined(parallel)) return;
  for (const double count : parallel.split) {
    require(count >= 1 && count == std::floor(count) && count < 1e6,
            format("parallel.split has {}, must have whole numbers from 1", count));
  }
  try {
    schedule::generate(schedule_options(config, world));
  } catch (const ConfigError& error) {
    throw ConfigError(format(
        "{} (ranks: parallel.pp; microbatches: train.global_batch {} / (train.micro_batch "
        "{} x dp {}))",
        error.what(), config.global_batch(world), config.train.micro_batch, config.dp(world)));
  }
}

}  // namespace lockstep::config
