// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/plan/timed_run.h"

#include "lockstep/config/pipeline_choice.h"
#include "lockstep/config/plan/planned_run.h"
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

plan::Layout timed_layout(const TrainConfig& config, const ModelSpec& model, int world) {
  const LayoutConfig& parallel = config.parallel;
  plan::Layout layout{.dims = config.dims(world),
                      .order = parallel.order,
                      .shard = parallel.shard,
                      .shards = shards_of(config, world),
                      .sequence = config.train.seq_len,
                      .micro_batch = config.train.micro_batch,
                      .micro_batches = config.accumulation(world),
                      .recompute = config.recompute(),
                      .sequence_parallel = parallel.sequence_parallel,
                      .offload_params = config.offload.params,
                      .offload_grads = config.offload.grads,
                      .offload_optimizer = config.offload.optimizer,
                      .element = static_cast<double>(element_bytes_of(config))};
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
  Prediction found{.config = config, .world = world, .layout = timed_layout(config, model, world)};
  found.time = plan::step_time(shape_of(model), found.layout, cluster);
  const auto ranks = plan::memory_per_rank(planned_run(config, model, world));
  found.largest_rank = plan::largest_total(ranks);
  found.memory = ranks[found.largest_rank].total();
  return found;
}

}  // namespace lockstep::config
