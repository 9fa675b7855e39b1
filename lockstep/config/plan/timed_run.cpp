// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/plan/timed_run.h"

#include "lockstep/config/pipeline_choice.h"
#include "lockstep/config/plan/fit_to_memory.h"
#include "lockstep/config/plan/planned_run.h"
#include "lockstep/config/plan/search.h"
#include "lockstep/plan/memory.h"
#include "lockstep/plan/report.h"

namespace lockstep::config {

plan::ModelShape shape_of(const ModelSpec& model) {
  return {.layers = model.layers,
          .hidden = model.hidden,
          .heads = model.heads,
          .kv_heads = model.num_kv_heads(),
          .head_size = model.head_size(),
          .ffn = model.ffn_size(),
          .vocab = model.vocab,
          .gated = model.kind == ModelKind::llama,
          .tied = model.is_tied(),
          .window = model.window};
}

bool computes_in_tiles(const TrainConfig& config, int sharing) {
  const int64_t row = config.train.seq_len / config.parallel.cp / sharing;
  const int64_t by_length = row >= kLongRow ? kLongTile : 0;
  const int64_t tile = config.train.tile.value_or(config.train.found_tile.value_or(by_length));
  return tile > 0 && tile < row;
}

std::optional<int64_t> fp8_min_of(const TrainConfig& config) {
  if (!config.train.is_fp8()) return std::nullopt;
  return config.train.fp8_min.value_or(kFp8Min);
}

plan::Layout timed_layout(const TrainConfig& config, const ModelSpec& model, int world) {
  const LayoutConfig& parallel = config.parallel;
  plan::Layout layout{
      .dims = config.dims(world),
      .order = parallel.order,
      .shard = parallel.shard,
      .shards = shards_of(config, world),
      .sequence = config.train.seq_len,
      .micro_batch = config.train.micro_batch,
      .micro_batches = config.accumulation(world),
      .rows = config.global_batch(world),
      .recompute = config.recompute(),
      .sequence_parallel = parallel.sequence_parallel,
      .tiles = computes_in_tiles(config, parallel.sequence_parallel ? parallel.tp : 1),
      .cp = parallel.cp,
      .ring = parallel.cp > 1 && config.attends_in_ring(),
      .offload_params = config.offload.params,
      .offload_grads = config.offload.grads,
      .offload_optimizer = config.offload.optimizer,
      .element = static_cast<double>(element_bytes_of(config)),
      .moment = static_cast<double>(moment_bytes_of(config))};
  if (config.train.fit) {
    for (int64_t i = 0; i < model.layers; ++i)
      layout.recompute_of_blocks.push_back(config.recompute_of(i));
  }
  layout.fp8_min = fp8_min_of(config);
  if (is_pipelined(parallel)) {
    const schedule::ScheduleOptions options = schedule_options(config, world);
    layout.schedule = options.kind;
    layout.chunks = options.chunks;
    layout.group = options.group;
    layout.schedule_file = options.file;
    layout.layers_per_stage = layers_per_stage(parallel, model.layers);
  }
  return layout;
}

Prediction predict(const TrainConfig& config, const ModelSpec& model, int world,
                   const plan::Cluster& cluster) {
  Prediction found{.config = config, .world = world};
  fit_to_memory(found.config, model, world, memory_limit(config, cluster));
  found.layout = timed_layout(found.config, model, world);
  found.time = plan::step_time(shape_of(model), found.layout, cluster);
  const auto ranks = plan::memory_per_rank(planned_run(found.config, model, world));
  found.largest_rank = plan::largest_total(ranks);
  found.memory = ranks[found.largest_rank].total();
  return found;
}

}  // namespace lockstep::config
