// SPDX-License-Identifier: Apache-2.0
// One call from a model to a job: applies all of a layout::ParallelConfig.
//
//   const comm::Group world = comm::init();
//   layout::ParallelConfig config{.dims = {.dp = 2, .pp = 2}, .micro_batch_size = 4,
//                                 .global_batch_size = 64};
//   auto model = parallel::parallelize(layers, config, world);
//   optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-3});
//   model.step({.inputs = ..., .loss = ...});
#pragma once

#include <concepts>
#include <memory>
#include <utility>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/layout/parallel_config.h"
#include "lockstep/parallel/pipeline/layer.h"
#include "lockstep/parallel/pipeline/pipeline.h"

namespace lockstep::parallel {

using layout::ParallelConfig;

// What the configuration says is done to the model: ranks on the axes dp, tp and pp, stages and
// schedule, sharding, precision, recomputation, strategy and timeout of communication, memory
// limit. `others` has what it does not speak of (tied parameters, device, units, offload, hooks);
// its fields of which the configuration decides must be left alone. Collective. ConfigError where
// layers, configuration and ranks do not fit.
//
// Layers are built without memory and get the values of others.advanced.initializer: by default
// their own, drawn as functions of seed, name and index, so that every layout begins with the same.
// Extreme keeps activations in a file in the folder TMPDIR names, unless `others` has a store.
Pipeline parallelize(const std::vector<Layer>& layers, const ParallelConfig& config,
                     const comm::Group& group, PipelineOptions others = {});

namespace detail {
// A layer that has the module's parts, by the same names.
void register_parts(torch::nn::Module& stage, torch::nn::Module& module);
void require_one_stage(const ParallelConfig& config);
// Without an initializer: the module has its values.
Pipeline parallelize_built(const Layer& layer, const ParallelConfig& config,
                           const comm::Group& group, PipelineOptions others);
}  // namespace detail

// The same for a module that is there, with the values that it has on rank 0. It is one layer, so
// that it cannot be cut into stages.
template <std::derived_from<torch::nn::Module> Module>
Pipeline parallelize(std::shared_ptr<Module> module, const ParallelConfig& config,
                     const comm::Group& group, PipelineOptions others = {}) {
  detail::require_one_stage(config);
  const Layer layer{[module](torch::nn::Module& stage) {
    detail::register_parts(stage, *module);
    return LayerForward(
        [module](const Tensors& in) { return detail::call(*module, module->name(), in); });
  }};
  return detail::parallelize_built(layer, config, group, std::move(others));
}
template <class Module>
Pipeline parallelize(const torch::nn::ModuleHolder<Module>& module, const ParallelConfig& config,
                     const comm::Group& group, PipelineOptions others = {}) {
  return parallelize(module.ptr(), config, group, std::move(others));
}

}  // namespace lockstep::parallel
