// SPDX-License-Identifier: Apache-2.0
// What of a model and its optimizer this rank holds, by the names that a checkpoint has.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <vector>

#include "lockstep/core/torch_fwd.h"
#include "lockstep/layout/placement.h"
#include "lockstep/optim/optimizer.h"
#include "lockstep/parallel/pipeline/pipeline.h"
#include "lockstep/parallel/shard/fully_shard.h"
#include "lockstep/parallel/tensor/tensor.h"

namespace lockstep::checkpoint {

// A tensor of this rank and its place in the whole model. The tensor's shape is
// placement.local_shape().
struct NamedSlice {
  layout::Placement placement;
  at::Tensor tensor;
  // For what is not a tensor where it is used: called before the tensor is saved or filled, and
  // when load() has filled it.
  std::function<void()> saving = {}, loaded = {};
  // Of which the tensor is a shard. load() opens its shards for writing, on all its ranks: a rank
  // that holds nothing of a model has empty slices of it.
  std::optional<parallel::ShardedModel> model = std::nullopt;
  // Ranks may hold other values, as of batch norm's statistics: those of the first are saved.
  bool of_first_rank = false;
};

// Call it before the memory of a slice's tensor is read through its pointer: encoded parameters in
// host memory are decoded, until another slice is used. Operators do it by themselves.
void open_to_read(const at::Tensor& tensor);

// Parameters and buffers, under their names in the module; a shared one under the first of its
// names. All are whole.
std::vector<NamedSlice> slices_of(const torch::nn::Module& model);
// The optimizer's state, as "optim." and the names that it gives it. Of torch's own optimizers
// Adam, AdamW, SGD, RMSprop and Adagrad can be saved, over parameters of the model, and have the
// same names; those of PyTorch's state_dict. Slices refer to the optimizer, which must live as
// long, and hold for all its later steps. What its first step would make is made now; where torch's
// SGD dampens, the first gradient after that is dampened too.
std::vector<NamedSlice> slices_of(optim::Optimizer& optimizer);
std::vector<NamedSlice> slices_of(const torch::nn::Module& model,
                                  torch::optim::Optimizer& optimizer);

// This rank's parts of a sharded model and of the optimizer over its parameters(), under the same
// names.
std::vector<NamedSlice> slices_of(const parallel::ShardedModel& model);
std::vector<NamedSlice> slices_of(const parallel::ShardedModel& model, optim::Optimizer& optimizer);
std::vector<NamedSlice> slices_of(const parallel::ShardedModel& model,
                                  torch::optim::Optimizer& optimizer);

// The same of a pipeline's stages on this rank; a tied parameter is its first stage's.
std::vector<NamedSlice> slices_of(const parallel::Pipeline& pipeline);
std::vector<NamedSlice> slices_of(const parallel::Pipeline& pipeline, optim::Optimizer& optimizer);
std::vector<NamedSlice> slices_of(const parallel::Pipeline& pipeline,
                                  torch::optim::Optimizer& optimizer);

// Slices of what tensor-parallel ranks left to this one, as slices of the whole model. Of a fused
// parameter they are several. Those of the functions above that take a pipeline are.
std::vector<NamedSlice> of_whole_model(const std::vector<NamedSlice>& slices,
                                       const parallel::TensorParallel& tensor);

// Model and optimizer together: what a checkpoint of a training run holds. `model` is a module
// (*model), its holder, a ShardedModel or a Pipeline; `optimizer` is Lockstep's or torch's.
std::vector<NamedSlice> state(const torch::nn::Module& model, optim::Optimizer& optimizer);
std::vector<NamedSlice> state(const torch::nn::Module& model, torch::optim::Optimizer& optimizer);
std::vector<NamedSlice> state(const parallel::ShardedModel& model, optim::Optimizer& optimizer);
std::vector<NamedSlice> state(const parallel::ShardedModel& model,
                              torch::optim::Optimizer& optimizer);
std::vector<NamedSlice> state(const parallel::Pipeline& pipeline, optim::Optimizer& optimizer);
std::vector<NamedSlice> state(const parallel::Pipeline& pipeline,
                              torch::optim::Optimizer& optimizer);
template <class T, class Optimizer>
std::vector<NamedSlice> state(const torch::nn::ModuleHolder<T>& model, Optimizer& optimizer) {
  return state(*model.ptr(), optimizer);
}

}  // namespace lockstep::checkpoint
