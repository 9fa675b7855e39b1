// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/model_options.h"

#include <set>
#include <utility>

#include "lockstep/config/float8.h"
#include "lockstep/config/freeze.h"
#include "lockstep/config/input_files.h"
#include "lockstep/core/format.h"
#include "lockstep/core/size_text.h"
#include "lockstep/model/language_model.h"
#include "lockstep/model/layers.h"
#include "lockstep/nn/linear.h"
#include "lockstep/parallel/offload/offload.h"
#include "lockstep/train/progress.h"

namespace lockstep::train {
namespace {

using config::TrainConfig;

// Blocks, and what comes before and after them.
bool is_unit(const std::string& path, torch::nn::Module&) {
  const std::string blocks = "blocks.";
  if (path.starts_with(blocks)) return path.find('.', blocks.size()) == std::string::npos;
  return path == "embed" || path == "positions" || path == "head";
}

// How linear layers are computed. In 8 bits are those of `float8`: "blocks.3.attention.qkv" is an
// attention.qkv.
void set_products(torch::nn::Module& stage, const std::set<std::string>& float8, bool is_sharded) {
  const std::string blocks = "blocks.";
  stage.apply([&](const std::string& path, torch::nn::Module& module) {
    auto* const linear = dynamic_cast<nn::LinearImpl*>(&module);
    if (linear == nullptr) return;
    linear->adds_gradient = !is_sharded;
    if (!path.starts_with(blocks)) return;
    linear->float8_cached = true;  // all that writes to weights here raises their version
    linear->float8 = float8.contains(path.substr(path.find('.', blocks.size()) + 1));
  });
}

}  // namespace

std::vector<parallel::Layer> model_layers(const TrainConfig& config, c10::Device device,
                                          const std::shared_ptr<nn::RandomContext>& random,
                                          const std::shared_ptr<model::Decoding>& decoding,
                                          const comm::Group& context,
                                          const std::shared_ptr<model::Tiling>& tiling) {
  auto layers = model::language_model_layers(config.model, tensor_options(config, device), random,
                                             decoding, {context, config.attends_in_ring()}, tiling);
  if (config.train.fit) {
    for (int64_t i = 0; i < config.model.layers; ++i)  // behind the embedding
      layers[static_cast<size_t>(i) + 1].own_recompute = config.recompute_of(i);
  }
  const auto frozen =
      std::make_shared<const std::set<std::string>>(config::frozen_tensors(config, config.model));
  const bool for_text = decoding != nullptr;  // no gradients, no optimizer state
  const std::set<std::string> float8 =
      for_text ? std::set<std::string>() : config::float8_layers(config, config.model);
  const bool is_sharded = config.parallel.shard != layout::ShardingStrategy::no_shard;
  for (parallel::Layer& layer : layers) {
    layer.build = [build = std::move(layer.build), frozen, float8, for_text,
                   is_sharded](torch::nn::Module& stage) {
      parallel::LayerForward forward = build(stage);
      if (!for_text) set_products(stage, float8, is_sharded);
      for (const auto& parameter : stage.named_parameters()) {
        if (for_text || frozen->contains(parameter.key()))
          parameter.value().set_requires_grad(false);
      }
      return forward;
    };
  }
  return layers;
}

at::TensorOptions tensor_options(const TrainConfig& config, c10::Device device) {
  const bool half = config.train.type() == config::Precision::bfloat16;
  return at::TensorOptions().device(device).dtype(half ? at::kBFloat16 : at::kFloat);
}

parallel::MaterializeOptions initializer(const TrainConfig& config, c10::Device device) {
  return {.seed = static_cast<uint64_t>(config.train.seed),
          .device = device,
          .rule = config.model_path.empty()
                      ? model::initial_values(config.model)
                      : model::hugging_face_values(config.model, config.model_path)};
}

parallel::FullyShardOptions shard_options(const TrainConfig& config) {
  parallel::FullyShardOptions options{.units = parallel::ByPredicate(is_unit),
                                      .use_orig_params = true,
                                      .reproducible = config.train.reproducible};
  if (config.offload.any()) options.offload = config.offload_options();
  options.advanced.hybrid_group_size = config.parallel.shard_size;
  options.advanced.granularity = config.parallel.shard_granularity;
  return options;
}

std::shared_ptr<parallel::ActivationStore> activation_store(const TrainConfig& config, int rank) {
  if (config.memory.strategy != layout::MemoryStrategy::extreme) return nullptr;
  if (config.memory.store == config::ActivationStore::host)
    return std::make_shared<parallel::ActivationStore>();
  return std::make_shared<parallel::ActivationStore>(config::activation_folder(config.memory),
                                                     memory::DiskStoreOptions{.rank = rank});
}

int64_t arenas_of(std::span<const parallel::ShardedModel> models) {
  int64_t bytes = 0;
  for (const parallel::ShardedModel& model : models) {
    const auto parameters = model.named_parameters();
    // A device's gathered parameters are in torch's allocator.
    if (!parameters.empty() && parameters[0].tensor.is_cpu()) bytes += model.stats().gather_bytes;
  }
  return bytes;
}

std::string describe_frozen(const TrainConfig& config) {
  const auto frozen = config::frozen_tensors(config, config.model);
  if (frozen.empty()) return "";
  int64_t elements = 0;
  for (const config::TensorSpec& tensor : config.model.tensors())
    elements += frozen.contains(tensor.name) ? layout::numel_of(tensor.shape) : 0;
  return format("freeze {} with {} of {} parameters",
                counted(static_cast<int64_t>(frozen.size()), "tensor"),
                short_number(static_cast<double>(elements)),
                short_number(static_cast<double>(config.model.parameters())));
}

std::string describe_shards(std::span<const parallel::ShardedModel> models) {
  double mine = 0, all = 0;
  size_t units = 0;
  for (const parallel::ShardedModel& model : models) {
    const parallel::ShardStats stats = model.stats();
    const auto count = static_cast<double>(stats.num_parameters);
    all += count;
    mine += stats.local_ratio * count;
    units += model.units().size();
  }
  if (units == 0) return "";
  const parallel::FullyShardOptions& options = models[0].options();
  const bool by_tensors = options.advanced.granularity == layout::ShardGranularity::tensors;
  return format("shard  {}{}: {} of {} parameters on this rank, in {} units",
                layout::name_of(options.strategy), by_tensors ? " by whole tensors" : "",
                short_number(mine), short_number(all), units);
}

std::string describe_offload(std::span<const parallel::ShardedModel> models) {
  int64_t device = 0, host = 0, disk = 0;
  std::string site;
  parallel::OffloadStats::Kept params, grads, state;
  layout::StateCodecs codecs;
  const auto add = [](parallel::OffloadStats::Kept& sum, const parallel::OffloadStats::Kept& one) {
    sum.bytes += one.bytes;
    sum.plain += one.plain;
  };
  for (const parallel::ShardedModel& model : models) {
    if (!std::holds_alternative<layout::OffloadOptions>(model.options().offload)) continue;
    const parallel::OffloadStats stats = parallel::offload_stats(model);
    device += stats.params_on_device + stats.state_on_device;
    host += stats.params_on_host + stats.state_on_host;
    disk += stats.state_on_disk;
    site = layout::name_of(stats.site);
    add(params, stats.params_kept);
    add(grads, stats.grads_kept);
    add(state, stats.state_kept);
    codecs = std::get<layout::OffloadOptions>(model.options().offload).codec;
  }
  if (site.empty()) return "";
  std::string line = format(
      "offload {} of parameters and optimizer state on the device, {} on the host{}; updates on "
      "the {}",
      size_text(device), size_text(host), disk > 0 ? format(", {} on disk", size_text(disk)) : "",
      site);
  const auto say = [&](const char* kind, const std::string& codec,
                       const parallel::OffloadStats::Kept& kept) {
    if (codec == "none" || kept.plain == 0) return;
    line += format("; {} on the host kept as {} in {:.3f} of the bytes", kind, codec, kept.ratio());
  };
  say("parameters", std::string(codec::name_of(codecs.params)), params);
  say("gradients", std::string(codec::name_of(codecs.grads)), grads);
  // What LZ4 makes of state is known after a step.
  const layout::StateCodecs moments{.exp_avg = codecs.exp_avg, .exp_avg_sq = codecs.exp_avg_sq};
  if (!moments.is_lossless()) say("optimizer state", layout::name_of(moments), state);
  return line;
}

}  // namespace lockstep::train
