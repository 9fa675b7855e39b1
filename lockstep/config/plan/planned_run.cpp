// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/plan/planned_run.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>
#include <utility>

#include "lockstep/config/freeze.h"
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

// The layers of the model that are not blocks, and one block.
enum class Part { embedding, block, head };

struct PartTensor {
  TensorSpec tensor;
  std::string unit;  // that it is gathered and reduced with
};

// In the order of the model. Blocks are alike but for what is frozen: `index` is that of the block.
std::vector<PartTensor> tensors_of(const ModelSpec& model, Part part, int64_t index) {
  const std::string prefix = "blocks.0.";
  ModelSpec one = model;
  one.layers = 1;
  std::vector<PartTensor> found;
  for (TensorSpec tensor : one.tensors()) {
    const bool of_block = tensor.name.starts_with(prefix);
    const bool of_embedding = tensor.name == "embed.weight" || tensor.name == "positions.weight";
    const Part its = of_block ? Part::block : of_embedding ? Part::embedding : Part::head;
    if (its != part) continue;
    const std::string unit = of_block       ? ""
                             : of_embedding ? tensor.name.substr(0, tensor.name.find('.'))
                             : tensor.name == "head.weight" ? "head"
                                                            : "norm";
    if (of_block) tensor.name = format("blocks.{}.{}", index, tensor.name.substr(prefix.size()));
    found.push_back({std::move(tensor), unit});
  }
  return found;
}

// Of one tensor-parallel rank. Frozen parameters of a unit are apart from those that are trained.
std::vector<plan::Unit> units_of(const std::vector<PartTensor>& tensors,
                                 const std::set<std::string>& frozen, const ModelSpec& model,
                                 const std::pair<int, int>& tp_and_rank) {
  const auto [tp, rank] = tp_and_rank;
  const auto is_frozen = [&](const PartTensor& each) { return frozen.contains(each.tensor.name); };
  const bool in_order = std::ranges::none_of(tensors, is_frozen);
  std::vector<plan::Unit> units;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& [tensor, name] = tensors[i];
    const bool trained = !is_frozen(tensors[i]);
    auto found = std::ranges::find_if(units, [&](const plan::Unit& unit) {
      return unit.name == name && unit.trained == trained;
    });
    if (found == units.end()) {
      const bool embedding = name == "embed" || name == "positions";
      found = units.insert(units.end(), {.name = name, .embedding = embedding, .trained = trained});
    }
    found->shapes.push_back(tensor_split(model, tensor, tp, rank).local_shape());
    if (name == "embed" && model.is_tied()) {
      found->places = {-1};
    } else if (!in_order) {
      found->places.push_back(static_cast<int64_t>(i));
    }
  }
  return units;
}

// Frozen parameters leave no gradients behind. What else backward would not need for their sake is
// not known, and counts.
plan::LayerKind planned_kind(const TrainConfig& config, const ModelSpec& model, Part part,
                             const std::vector<PartTensor>& tensors,
                             const std::set<std::string>& frozen) {
  const LayerSizes sizes = sizes_of(config, model);
  const LayerType type = part == Part::embedding ? LayerType::embedding
                         : part == Part::block   ? LayerType::block
                                                 : LayerType::head;
  plan::LayerKind kind{.cost = layer_cost(type, sizes)};
  const int tp = config.parallel.tp;
  for (int rank = 0; rank < tp; ++rank)
    kind.units.push_back(units_of(tensors, frozen, model, {tp, rank}));
  int64_t unused = 0;
  for (const plan::Unit& unit : kind.units[0]) {
    for (const layout::Shape& shape : unit.shapes)
      unused += unit.trained ? 0 : layout::numel_of(shape) * sizes.element;
  }
  // The head's gradient of a tied table.
  if (part == Part::head && model.is_tied() && frozen.contains("embed.weight"))
    unused += sizes.vocab * sizes.hidden * sizes.element;
  plan::LayerCost& cost = kind.cost;
  cost.weights = std::max<int64_t>(0, cost.weights - unused);
  cost.backward_peak_keeping =
      std::min(cost.backward_peak_keeping, cost.backward_peak + cost.weights);
  cost.weight_peak_keeping = std::min(cost.weight_peak_keeping, cost.weight_peak + cost.weights);
  return kind;
}

plan::Model planned_model(const TrainConfig& config, const ModelSpec& model) {
  const LayerSizes sizes = sizes_of(config, model);
  const std::set<std::string> frozen = frozen_tensors(config, model);
  plan::Model planned{.stream_bytes = sizes.stream()};
  // Layers with the same frozen tensors are of one kind.
  std::map<std::pair<Part, std::vector<bool>>, size_t> kinds;
  const auto add = [&](const std::string& name, Part part, int64_t index) {
    const auto tensors = tensors_of(model, part, index);
    std::vector<bool> mask;
    for (const PartTensor& each : tensors) mask.push_back(frozen.contains(each.tensor.name));
    const auto [kind, is_new] = kinds.emplace(std::pair(part, mask), planned.kinds.size());
    if (is_new) planned.kinds.push_back(planned_kind(config, model, part, tensors, frozen));
    planned.layers.push_back({.name = name, .kind = kind->second});
  };
  add("", Part::embedding, 0);
  for (int64_t i = 0; i < model.layers; ++i) add(format("blocks.{}", i), Part::block, i);
  add("", Part::head, 0);
  if (model.is_tied()) {
    planned.tied = "head";
    planned.tied_bytes =
        frozen.contains("embed.weight") ? 0 : sizes.vocab * sizes.hidden * sizes.element;
    planned.reserved = 1;
  }
  return planned;
}

}  // namespace

int shards_of(const TrainConfig& config, int world) {
  const layout::ShardingStrategy shard = config.parallel.shard;
  const int size = config.parallel.shard_size;
  if (shard == layout::ShardingStrategy::no_shard) return 1;
  return shard == layout::ShardingStrategy::hybrid_shard && size > 0 ? size : config.dp(world);
}

int64_t state_bytes_of(const TrainConfig& config) {
  const bool adamw = config.optim.name == OptimizerKind::adamw;
  const int64_t moments = adamw ? 2 : config.optim.momentum > 0 ? 1 : 0;
  return 4 * moments + (element_bytes_of(config) == 2 ? 4 : 0);
}

plan::LayerCost cost_of(LayerType type, const TrainConfig& config, const ModelSpec& model) {
  return layer_cost(type, sizes_of(config, model));
}

int64_t element_bytes_of(const TrainConfig& config) {
  return config.train.dtype == Precision::bfloat16 ? 2 : 4;
}

plan::Run planned_run(const TrainConfig& config, const ModelSpec& model, int world) {
  plan::Run run{
      .model = planned_model(config, model),
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
      .cuda = kernels_of(config).cuda};
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
