// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/plan/planned_run.h"

#include <filesystem>
#include <utility>

#include "lockstep/config/model/layer_cost.h"
#include "lockstep/config/pipeline_choice.h"
#include "lockstep/config/tensor_parallel.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/size_text.h"
#include "lockstep/plan/memory.h"
#include "lockstep/plan/report.h"

namespace lockstep::config {
namespace {

Kernels kernels_of(const TrainConfig& config) {
  const auto device = config.train.device;
  const bool automatic = device == DeviceKind::automatic;
  return {.cuda = device == DeviceKind::cuda || (automatic && LOCKSTEP_LIBTORCH_CUDA &&
                                                 std::filesystem::exists("/dev/nvidiactl")),
          .fused_attention = LOCKSTEP_LIBTORCH_MAJOR >= 2,
          .mean_saves = LOCKSTEP_LIBTORCH_MAJOR < 2};
}

LayerSizes sizes_of(const TrainConfig& config, const ModelSpec& model) {
  const int64_t tp = config.parallel.tp;
  return {.batch = config.train.micro_batch,
          .length = config.train.seq_len,
          .hidden = model.hidden,
          .heads = model.heads / tp,
          .kv_heads = model.num_kv_heads() / tp,
          .width = model.head_size(),
          .ffn = model.ffn_size() / tp,
          .vocab = (model.vocab + tp - 1) / tp,
          .positions = model.positions,
          .element = element_bytes_of(config),
          .stream_shares = config.parallel.sequence_parallel ? tp : 1,
          .window = model.window,
          .llama = model.kind == ModelKind::llama,
          .qkv_bias = model.kind == ModelKind::gpt || model.qkv_bias,
          .qk_norm = model.qk_norm,
          .tensor_parallel = tp > 1,
          .dropout = model.dropout,
          .recompute = config.recompute(),
          .on_disk = config.memory.strategy == layout::MemoryStrategy::extreme,
          .kernels = kernels_of(config)};
}

// Of one tensor-parallel rank.
struct LayerUnits {
  std::vector<plan::Unit> embedding, block, head;
};

LayerUnits local_units(const ModelSpec& model, int tp, int rank) {
  ModelSpec one = model;  // blocks are alike
  one.layers = 1;
  plan::Unit embed{.name = "embed", .embedding = true}, positions{"positions", {}, true};
  plan::Unit block, norm{.name = "norm"}, head{.name = "head"};
  for (const TensorSpec& tensor : one.tensors()) {
    auto& unit = tensor.name == "embed.weight"          ? embed
                 : tensor.name == "positions.weight"    ? positions
                 : tensor.name == "head.weight"         ? head
                 : tensor.name.starts_with("blocks.0.") ? block
                                                        : norm;
    unit.shapes.push_back(tensor_split(model, tensor, tp, rank).local_shape());
  }
  if (model.is_tied()) embed.places = {-1};
  LayerUnits units{.embedding = {std::move(embed)}, .block = {std::move(block)}, .head = {norm}};
  if (!positions.shapes.empty()) units.embedding.push_back(std::move(positions));
  if (!model.is_tied()) units.head.push_back(std::move(head));
  return units;
}

plan::Model planned_model(const ModelSpec& model, const LayerSizes& sizes, int tp) {
  plan::Model planned{.kinds = {{.cost = layer_cost(LayerType::embedding, sizes)},
                                {.cost = layer_cost(LayerType::block, sizes)},
                                {.cost = layer_cost(LayerType::head, sizes)}},
                      .stream_bytes = sizes.stream()};
  for (int rank = 0; rank < tp; ++rank) {
    LayerUnits units = local_units(model, tp, rank);
    planned.kinds[0].units.push_back(std::move(units.embedding));
    planned.kinds[1].units.push_back(std::move(units.block));
    planned.kinds[2].units.push_back(std::move(units.head));
  }
  planned.layers.push_back({.kind = 0});
  for (int64_t i = 0; i < model.layers; ++i)
    planned.layers.push_back({.name = format("blocks.{}", i), .kind = 1});
  planned.layers.push_back({.kind = 2});
  if (model.is_tied()) {
    planned.tied = "head";
    planned.tied_bytes = sizes.vocab * sizes.hidden * sizes.element;
    planned.reserved = 1;
  }
  return planned;
}

// Those of a host, where no number is given: all.
int shards_of(const TrainConfig& config, int world) {
  const layout::ShardingStrategy shard = config.parallel.shard;
  const int size = config.parallel.shard_size;
  if (shard == layout::ShardingStrategy::no_shard) return 1;
  return shard == layout::ShardingStrategy::hybrid_shard && size > 0 ? size : config.dp(world);
}

// Moments in float32; 16-bit parameters have a master.
int64_t state_bytes_of(const TrainConfig& config) {
  const bool adamw = config.optim.name == OptimizerKind::adamw;
  const int64_t moments = adamw ? 2 : config.optim.momentum > 0 ? 1 : 0;
  return 4 * moments + (element_bytes_of(config) == 2 ? 4 : 0);
}

}  // namespace

int64_t element_bytes_of(const TrainConfig& config) {
  return config.train.dtype == Precision::bfloat16 ? 2 : 4;
}

plan::Run planned_run(const TrainConfig& config, const ModelSpec& model, int world) {
  const LayerSizes sizes = sizes_of(config, model);
  plan::Run run{
      .model = planned_model(model, sizes, config.parallel.tp),
      .dims = config.dims(world),
      .order = config.parallel.order,
      .sharding = config.parallel.shard,
      .shards = shards_of(config, world),
      .granularity = config.parallel.shard_granularity,
      .offload = config.offload_options(),
      .micro_batches = config.accumulation(world),
      .dtype = config.train.dtype == Precision::bfloat16 ? DType::bfloat16 : DType::float32,
      .state_bytes = state_bytes_of(config),
      .reproducible = config.train.reproducible,
      .cuda = sizes.kernels.cuda};
  if (is_pipelined(config.parallel)) {
    run.pipeline = schedule_options(config, world);
    run.layers_per_stage = layers_per_stage(config.parallel, model.layers);
  }
  return run;
}

void require_state_fits(const TrainConfig& config, const ModelSpec& model, int world) {
  const int64_t limit = config.memory.max_per_device;
  if (limit == 0) return;
  const std::vector<plan::Memory> ranks = plan::memory_per_rank(planned_run(config, model, world));
  const size_t rank = plan::largest_state(ranks);
  const plan::Memory& memory = ranks[rank];
  if (memory.state() <= limit) return;
  throw ConfigError(
      format("memory.max_per_device is {}, but rank {} needs {} for what it keeps from step to "
             "step: parameters {}, gradients {}, optimizer state {}; share them among more ranks "
             "(parallel.shard, tp, pp), use a smaller model or allow more",
             size_text(limit), rank, size_text(memory.state()), size_text(memory.parameters),
             size_text(memory.gradients), size_text(memory.optimizer)));
}

}  // namespace lockstep::config
