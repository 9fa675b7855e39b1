// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/parallelize.h"

#include <cstdlib>
#include <optional>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/require.h"
#include "lockstep/memory/device_size.h"
#include "lockstep/mesh/mesh.h"
#include "lockstep/nn/kernels/can_multiply.h"

namespace lockstep::parallel {
namespace {

constexpr Requirement require_fit("parallelize");

// What is said twice could be said in two ways.
void check_left_alone(const PipelineOptions& others) {
  const PipelineOptions untouched;
  const auto check = [](bool same, const char* field, const char* instead) {
    require_fit(same,
                format("PipelineOptions::{} is set, but ParallelConfig::{} decides: leave it alone",
                       field, instead));
  };
  check(others.schedule == untouched.schedule, "schedule", "schedule");
  check(others.microbatches == 1, "microbatches", "global_batch_size");
  check(others.chunks == 1, "chunks", "advanced.chunks");
  check(others.split.empty(), "split", "advanced.layer_split");
  check(others.plan.empty(), "plan", "tensor_plan");
  check(!others.advanced.sequence_parallel, "advanced.sequence_parallel",
        "advanced.sequence_parallel");
  check(others.advanced.recompute == layout::Recompute::none, "advanced.recompute", "memory");
  if (const auto* shard = std::get_if<FullyShardOptions>(&others.data)) {
    const FullyShardOptions defaults;
    check(shard->strategy == defaults.strategy, "data: FullyShardOptions::strategy", "sharding");
  }
}

// Products in bfloat16, of weights whose float32 copies the optimizer updates.
MixedPrecision mixed(const PipelineOptions& others) {
  require_fit(nn::can_multiply(at::kBFloat16, others.device),
              format("mixed_precision is on, but libtorch cannot multiply bfloat16 matrices on {}",
                     others.device.str()));
  return {.param = at::kBFloat16, .reduce = at::kFloat};
}

void choose_data(const ParallelConfig& config, PipelineOptions& options) {
  auto* shard = std::get_if<FullyShardOptions>(&options.data);
  const bool shards = config.sharding != layout::ShardingStrategy::no_shard;
  if (!shards && !config.mixed_precision && shard == nullptr) return;  // DDP
  if (shard == nullptr) {
    const DdpOptions ddp = std::get<DdpOptions>(options.data), untouched;
    const bool left_alone = !ddp.hook && ddp.bucket_bytes == untouched.bucket_bytes &&
                            !ddp.find_unused_parameters && !ddp.static_graph &&
                            ddp.broadcast_buffers && !ddp.uneven_inputs &&
                            ddp.sparse_parameters.empty();
    require_fit(left_alone,
                format("sharding is {} and mixed_precision {}, so the stages are not DDP's, but "
                       "PipelineOptions::data has DdpOptions other than reproducible: give "
                       "FullyShardOptions",
                       layout::name_of(config.sharding), config.mixed_precision ? "on" : "off"));
    options.data = FullyShardOptions{.use_orig_params = true, .reproducible = ddp.reproducible};
    shard = &std::get<FullyShardOptions>(options.data);
    shard->advanced.observe = ddp.advanced.observe;
  }
  shard->strategy = config.sharding;
  if (config.mixed_precision) {
    require_fit(
        !shard->mixed_precision.param && !shard->mixed_precision.reduce,
        "ParallelConfig::mixed_precision is on, and FullyShardOptions::mixed_precision is set "
        "too: say it once");
    const auto buffer = shard->mixed_precision.buffer;
    shard->mixed_precision = mixed(options);
    shard->mixed_precision.buffer = buffer;
  }
}

std::string scratch_folder() {
  const char* const folder = std::getenv("TMPDIR");
  return folder == nullptr || *folder == '\0' ? "/tmp" : folder;
}

comm::Group arranged(comm::Group group, const layout::ParallelAdvancedConfig& config) {
  if (config.communication && *config.communication != group.strategy()) {
    group = group.with_strategy(*config.communication);
  }
  if (config.communication_timeout.count() > 0 && config.communication_timeout != group.timeout()) {
    group = group.with_timeout(config.communication_timeout);
  }
  return group;
}

Pipeline apply(const std::vector<Layer>& layers, const ParallelConfig& config,
               const comm::Group& given, PipelineOptions options) {
  config.dims.validate(given.size());
  options = pipeline_options(config, static_cast<int64_t>(layers.size()), std::move(options));
  if (config.activations_to_disk() && !options.advanced.store) {
    options.advanced.store = std::make_shared<ActivationStore>(
        scratch_folder(), memory::DiskStoreOptions{.rank = given.rank()});
  }
  const comm::Group group = arranged(given, config.advanced);
  const auto mesh = mesh::Mesh::parallel(group, config.dims, config.advanced.order);
  const c10::Device device = options.device;
  // CUDA's allocator is there, and counts, once something was allocated.
  if (device.is_cpu()) memory::limit_device(device, config.advanced.max_memory_per_device);
  Pipeline pipeline(layers, mesh, std::move(options));
  if (!device.is_cpu()) memory::limit_device(device, config.advanced.max_memory_per_device);
  return pipeline;
}

}  // namespace

namespace detail {

void register_parts(torch::nn::Module& stage, torch::nn::Module& module) {
  for (const auto& child : module.named_children())
    stage.register_module(child.key(), child.value());
  for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
    stage.register_parameter(parameter.key(), parameter.value(), parameter.value().requires_grad());
  }
  for (const auto& buffer : module.named_buffers(/*recurse=*/false)) {
    stage.register_buffer(buffer.key(), buffer.value());
  }
}

void require_one_stage(const ParallelConfig& config) {
  require_fit(
      config.dims.pp == 1,
      format("a module is one layer, but pp is {}: give the model as layers, of which stages "
             "can be made",
             config.dims.pp));
}

Pipeline parallelize_built(const Layer& layer, const ParallelConfig& config,
                           const comm::Group& group, PipelineOptions others) {
  require_fit(
      !others.advanced.initializer,
      "PipelineOptions::advanced.initializer is set, but the module has values: give the model "
      "as layers, which are built without memory");
  return apply({layer}, config, group, std::move(others));
}

}  // namespace detail

PipelineOptions pipeline_options(const ParallelConfig& config, int64_t layers,
                                 PipelineOptions options) {
  config.validate(static_cast<int>(config.dims.world_size()));
  check_left_alone(options);
  const int said = config.advanced.num_layers;
  require_fit(
      said == 0 || said == layers,
      format("num_layers is {}, but {} layers are given: must be the same, or 0", said, layers));
  options.schedule = config.dims.pp == 1 ? layout::PipelineSchedule::one_f_one_b : config.schedule;
  options.microbatches = config.microbatches();
  options.chunks = config.chunks();
  options.split = config.layers_per_stage(layers);
  options.plan = config.tensor_plan;
  options.advanced.sequence_parallel = config.advanced.sequence_parallel;
  options.advanced.recompute = config.recompute();
  choose_data(config, options);
  return options;
}

Pipeline parallelize(const std::vector<Layer>& layers, const ParallelConfig& config,
                     const comm::Group& group, PipelineOptions others) {
  if (!others.advanced.initializer) {
    others.advanced.initializer = MaterializeOptions{.device = others.device};
  }
  return apply(layers, config, group, std::move(others));
}

}  // namespace lockstep::parallel
