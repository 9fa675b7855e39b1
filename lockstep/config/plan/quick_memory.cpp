// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/plan/quick_memory.h"

#include <algorithm>

#include "lockstep/config/plan/planned_run.h"
#include "lockstep/config/plan/timed_run.h"

namespace lockstep::config {
namespace {

using layout::PipelineSchedule;
using layout::ShardingStrategy;

// Micro-batches that the first rank holds at a time, in stages of the whole rank.
double live_of(const plan::Layout& layout) {
  const double ranks = layout.dims.pp;
  const auto batches = static_cast<double>(layout.micro_batches);
  if (ranks == 1) return 1;
  switch (layout.schedule) {
    case PipelineSchedule::gpipe:
    case PipelineSchedule::looped_bfs:
      return batches;
    case PipelineSchedule::zb_h2:
      return std::min(batches, 2 * ranks - 1);
    case PipelineSchedule::interleaved: {
      const double chunks = layout.chunks;
      return std::min(batches, ((chunks - 1) * ranks + 2 * (ranks - 1) + 1) / chunks);
    }
    default:
      return std::min(batches, ranks);
  }
}

}  // namespace

const QuickMemory::Costs& QuickMemory::costs_of(const TrainConfig& config, const ModelSpec& model,
                                                const plan::Layout& layout) {
  auto [found, is_new] = costs_.try_emplace(
      {layout.dims.tp, layout.sequence_parallel, layout.micro_batch, layout.recompute});
  if (is_new) {
    TrainConfig one = config;
    one.parallel.tp = layout.dims.tp;
    one.parallel.sequence_parallel = layout.sequence_parallel;
    one.train.micro_batch = layout.micro_batch;
    one.train.recompute = layout.recompute;
    found->second = {cost_of(LayerType::embedding, one, model),
                     cost_of(LayerType::block, one, model), cost_of(LayerType::head, one, model)};
  }
  return found->second;
}

double QuickMemory::bytes(const TrainConfig& config, const ModelSpec& model,
                          const plan::Layout& layout) {
  const Costs& costs = costs_of(config, model, layout);
  const plan::ModelShape shape = shape_of(model);
  const double block = shape.block_parameters() / layout.dims.tp;
  const double table = shape.table_parameters() / layout.dims.tp;
  const double element = layout.element, state = static_cast<double>(state_bytes_of(config));
  const double shards = layout.shards;
  const bool gathers = shards > 1 && layout.shard != ShardingStrategy::no_shard &&
                       layout.shard != ShardingStrategy::optimizer;
  const double waits = layout.micro_batches > 1 ? 1 : 0;
  // Of a rank with so many blocks, with the embedding and the head or without them.
  const auto rank_bytes = [&](double blocks, bool first, bool last, double live) {
    const bool both = first && last;
    const double tables = (first || last ? 1 : 0) + (both && !shape.tied ? 1 : 0);
    const double parameters = blocks * block + tables * table;
    double total = 0;
    if (gathers) {
      total += parameters * (2 * element + state) / shards;
      const bool all = layout.dims.pp > 1 || layout.shard == ShardingStrategy::shard_grad_op;
      total += element * (all ? parameters : 2 * std::max(block, tables * table));
      total += element * (waits > 0 ? parameters : 2 * std::max(block, tables * table));
    } else {
      const double own = layout.shard == ShardingStrategy::optimizer ? shards : 1;
      total += parameters * (2 * element + (own > 1 ? element / own : 0));
      if (!layout.offload_optimizer) total += parameters * state / own;
      if (own == 1 && layout.dims.dp > 1 && waits > 0) total += parameters * element;
    }
    const double kept = blocks * static_cast<double>(costs.block.kept) +
                        (first ? static_cast<double>(costs.embedding.kept) : 0);
    double peak = static_cast<double>(costs.block.backward_peak);
    if (last)
      peak = std::max({peak, static_cast<double>(costs.head.backward_peak),
                       static_cast<double>(costs.head.forward_peak)});
    return total + live * kept + peak;
  };
  const double live = live_of(layout);
  if (layout.dims.pp == 1) return rank_bytes(static_cast<double>(model.layers), true, true, live);
  // The first rank holds the most micro-batches, the last has the head. Chunks of a V are at both
  // ends.
  double first = 0, last = 0;
  const auto& counts = layout.layers_per_stage;
  for (size_t stage = 0; stage < counts.size(); stage += static_cast<size_t>(layout.dims.pp)) {
    first += counts[stage];
    last += counts[stage + static_cast<size_t>(layout.dims.pp) - 1];
  }
  const bool v =
      layout.schedule == PipelineSchedule::zb_v || layout.schedule == PipelineSchedule::dualpipe_v;
  const double all = std::max(first, last);
  if (v) return rank_bytes(all - 1, true, true, live);
  return std::max(rank_bytes(first - 1, true, false, live),
                  rank_bytes(last - 1, false, true,
                             layout.schedule == PipelineSchedule::zb_h1 ? live : live / 2));
}

}  // namespace lockstep::config
