// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/plan/planned_run.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "lockstep/config/float8.h"
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

Float8Products float8_of(const TrainConfig& config, const ModelSpec& model) {
  const std::set<std::string> layers = float8_layers(config, model);
  return {.qkv = layers.contains("attention.qkv"),
          .out = layers.contains("attention.out"),
          .up = layers.contains("mlp.up") || layers.contains("mlp.gate_up"),
          .down = layers.contains("mlp.down")};
}

LayerSizes sizes_of(const TrainConfig& config, const ModelSpec& model,
                    layout::Recompute recompute) {
  const int64_t tp = config.parallel.tp;
  return {.batch = config.train.micro_batch,
          .length = config.train.seq_len / config.parallel.cp,
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
          .tile = config.tile(),
          .llama = model.kind == ModelKind::llama,
          .qkv_bias = model.kind == ModelKind::gpt || model.qkv_bias,
          .qk_norm = model.qk_norm,
          .tensor_parallel = tp > 1,
          .dropout = model.dropout,
          .recompute = recompute,
          .on_disk = config.memory.strategy == layout::MemoryStrategy::extreme &&
                     (config.memory.store == ActivationStore::disk || kernels_of(config).cuda),
          .kernels = kernels_of(config),
          .float8 = float8_of(config, model)};
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
    const TensorSpec& tensor = tensors[i].tensor;
    const std::string& name = tensors[i].unit;
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

// Bytes of a block's weights in 8 bits, which are kept next to weights that stay where they are.
int64_t kept_codes(const TrainConfig& config, int world, const ModelSpec& model,
                   const std::vector<PartTensor>& tensors) {
  if (shards_of(config, world) > 1 || config.offload.any()) return 0;
  int64_t bytes = 0;
  for (const std::string& layer : float8_layers(config, model)) {
    for (const PartTensor& each : tensors) {
      if (each.tensor.name.ends_with("." + layer + ".weight"))
        bytes += layout::numel_of(each.tensor.shape) / config.parallel.tp;
    }
  }
  return bytes;
}

// Ranks that share rows have the keys and values of whole rows, and their gradients in backward.
// In a ring they have those of two ranks and, in backward, gradients that are computed, sent and
// received.
void add_exchanged_keys(const TrainConfig& config, const LayerSizes& sizes, plan::LayerCost& cost) {
  const int64_t local = 2 * sizes.batch * sizes.length * sizes.kv_heads * sizes.width;
  if (config.attends_in_ring()) {
    const int64_t sums = 4 * sizes.batch * sizes.length * sizes.heads;  // of exponentials
    if (sizes.recompute != layout::Recompute::full) cost.kept += sums;
    cost.forward_peak += 2 * local * sizes.element + sums;
    for (int64_t* const peak : {&cost.backward_peak, &cost.backward_peak_keeping, &cost.input_peak})
      *peak += 2 * local * sizes.element + int64_t{3} * 4 * local + 2 * sums;
    return;
  }
  const int64_t elements = local * config.parallel.cp;
  const int64_t gathered = elements * sizes.element;
  if (sizes.recompute == layout::Recompute::none) cost.kept += gathered;
  cost.forward_peak += gathered;
  for (int64_t* const peak : {&cost.backward_peak, &cost.backward_peak_keeping, &cost.input_peak})
    *peak += 2 * gathered + 4 * elements;
}

// Frozen parameters leave no gradients behind. What else backward would not need for their sake is
// not known, and counts.
plan::LayerKind planned_kind(const TrainConfig& config, int world, const ModelSpec& model,
                             Part part, layout::Recompute recompute,
                             const std::vector<PartTensor>& tensors,
                             const std::set<std::string>& frozen) {
  const LayerSizes sizes = sizes_of(config, model, recompute);
  const LayerType type = part == Part::embedding ? LayerType::embedding
                         : part == Part::block   ? LayerType::block
                                                 : LayerType::head;
  plan::LayerKind kind{.cost = layer_cost(type, sizes)};
  const int tp = config.parallel.tp;
  if (part == Part::block) kind.buffers = kept_codes(config, world, model, tensors);
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
  if (part == Part::block && config.parallel.cp > 1) add_exchanged_keys(config, sizes, cost);
  return kind;
}

plan::Model planned_model(const TrainConfig& config, const ModelSpec& model, int world) {
  const LayerSizes sizes = sizes_of(config, model, config.recompute());
  const std::set<std::string> frozen = frozen_tensors(config, model);
  plan::Model planned{.stream_bytes = sizes.stream()};
  // Layers that have the same frozen tensors, and recompute as much, are of one kind.
  std::map<std::tuple<Part, layout::Recompute, std::vector<bool>>, size_t> kinds;
  const auto add = [&](const std::string& name, Part part, int64_t index) {
    const auto tensors = tensors_of(model, part, index);
    std::vector<bool> mask;
    for (const PartTensor& each : tensors) mask.push_back(frozen.contains(each.tensor.name));
    const layout::Recompute again =
        part == Part::block ? config.recompute_of(index) : config.recompute();
    const auto [kind, is_new] = kinds.emplace(std::tuple(part, again, mask), planned.kinds.size());
    if (is_new) {
      planned.kinds.push_back(planned_kind(config, world, model, part, again, tensors, frozen));
    }
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
  return shard == layout::ShardingStrategy::hybrid_shard && size > 0 ? size : config.dims(world).dp;
}

int64_t moment_bytes_of(const TrainConfig& config) {
  return config.optim.moments == Precision::bfloat16 ? 2 : 4;
}

int64_t state_bytes_of(const TrainConfig& config) {
  const bool adamw = config.optim.name == OptimizerKind::adamw;
  const int64_t moments = adamw ? 2 : config.optim.momentum > 0 ? 1 : 0;
  return moment_bytes_of(config) * moments + (element_bytes_of(config) == 2 ? 4 : 0);
}

plan::LayerCost cost_of(LayerType type, const TrainConfig& config, const ModelSpec& model) {
  return layer_cost(type, sizes_of(config, model, config.recompute()));
}

int64_t element_bytes_of(const TrainConfig& config) {
  return config.train.type() == Precision::bfloat16 ? 2 : 4;
}

plan::Run planned_run(const TrainConfig& config, const ModelSpec& model, int world) {
  plan::Run run{
      .model = planned_model(config, model, world),
      .dims = config.dims(world),
      .order = config.parallel.order,
      .sharding = config.parallel.shard,
      .shards = shards_of(config, world),
      .granularity = config.parallel.shard_granularity,
      .offload = config.offload_options(),
      .micro_batches = config.accumulation(world),
      .dtype = config.train.type() == Precision::bfloat16 ? DType::bfloat16 : DType::float32,
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
