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
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/layout/parallel_config.h"
#include "lockstep/parallel/pipeline/layer.h"
#include "lockstep/parallel/pipeline/pipeline.h"
#include "lockstep/plan/memory.h"

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
// The memory limit is the process's: each call sets it again. Extreme keeps activations in a file
// in the folder TMPDIR names, unless `others` has a store.
Pipeline parallelize(const std::vector<Layer>& layers, const ParallelConfig& config,
                     const comm::Group& group, PipelineOptions others = {});

// What parallelize() makes a pipeline of so many layers with, but for a store of activations.
PipelineOptions pipeline_options(const ParallelConfig& config, int64_t layers,
                                 PipelineOptions others = {});

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
    return LayerForward([module](const Tensors& in) {
      return detail::call<Module>(module.get(), module->name(), in);
    });
  }};
  return detail::parallelize_built(layer, config, group, std::move(others));
}
template <class Module>
Pipeline parallelize(const torch::nn::ModuleHolder<Module>& module, const ParallelConfig& config,
                     const comm::Group& group, PipelineOptions others = {}) {
  return parallelize(module.ptr(), config, group, std::move(others));
}

// What memory_of() has to know about a training in addition to its layout.
struct MemoryOptions {
  int64_t rows = 0;   // of a micro-batch; 0: as many as the example inputs have
  int batch_dim = 0;  // dimension of the example inputs that counts rows
  // Of the optimizer's state for each trained element: 8 for AdamW, 4 for SGD with momentum.
  int64_t optimizer_bytes = 8;
  // Inputs of layers that are computed again are on disk.
  bool on_disk = false;
  layout::Order order = layout::Order::pp_fastest;  // of the ranks
  // Of the last layer's outputs, which may have fewer rows than asked for; counts with that layer.
  // None: the outputs get a gradient.
  std::function<at::Tensor(const Tensors& outputs)> loss = {};
};

// One layer of a model, on the first tensor-parallel rank, in bytes.
struct LayerMemory {
  std::string name = {};      // path of its first parameter's module; "layer 3" where it has none
  int64_t parameters = 0;     // with the modules' buffers
  int64_t kept = 0;           // from forward to backward, for each micro-batch in flight
  int64_t forward_peak = 0;   // while it computes, on top of what other layers keep
  int64_t backward_peak = 0;  // the same, with what it keeps
  bool on_meta = false;       // counted on the meta device; else on the CPU
};

struct ModelMemory {
  std::vector<plan::Memory> ranks = {};  // at the peak of a step after the first
  std::vector<LayerMemory> layers = {};
  // How it was counted: "layers 0-3: meta device; layer 4: CPU; scaled from 2 and 3 rows to 16".
  std::string counted = {};
};

// How much memory each rank of a training would take, before it is started. Builds the layers one
// after the other and runs each distinct one on the CPU or, where all its operators allow it, on
// the meta device, with at most 3 rows: more are extrapolated, block by block. Needs no ranks, and
// leaves torch's random generator, and modules that were there before, as they were. Throws
// ConfigError where layers and ranks do not fit.
ModelMemory memory_of(const std::vector<Layer>& layers, const Tensors& example_inputs,
                      const layout::ParallelDims& dims, const PipelineOptions& options = {},
                      const MemoryOptions& how = {});
// The same for a configuration, as parallelize() would apply it, with micro_batch_size rows.
ModelMemory memory_of(const std::vector<Layer>& layers, const Tensors& example_inputs,
                      const ParallelConfig& config, MemoryOptions how = {},
                      PipelineOptions others = {});

struct LayoutSearch {
  int ranks = 1;
  // As `lockstep plan --cluster` takes it: a100, h100, h200 or a file. Empty: what `lockstep bench
  // machine` wrote on this host, else h100.
  std::string cluster = {};
  int count = 3;              // layouts to return, at most
  MemoryOptions memory = {};  // with the loss, which is timed with the last layer
};

struct PlannedLayout {
  ParallelConfig config = {};
  double step_seconds = 0;   // predicted
  int64_t memory_bytes = 0;  // of the rank that takes most
};

// The layouts of so many ranks that are predicted to be fastest, fastest first, among those that
// fit into advanced.max_memory_per_device or, where that is 0, into a device of the cluster. Times
// each distinct layer on others.device, in this process alone, and simulates a step; leaves torch's
// random generator as it was. Searched: dims (tp where there is a tensor_plan), sharding, schedule,
// chunks, layers of each stage, and micro-batches of at most micro_batch_size rows; the rest of
// `config` is kept. global_batch_size 0: micro_batch_size on each rank. Needs no ranks. ConfigError
// where no layout fits.
std::vector<PlannedLayout> plan_layouts(const std::vector<Layer>& layers,
                                        const Tensors& example_inputs, const ParallelConfig& config,
                                        const LayoutSearch& how,
                                        const PipelineOptions& others = {});

}  // namespace lockstep::parallel
