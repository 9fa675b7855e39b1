// SPDX-License-Identifier: Apache-2.0
// Norm of the gradients, and clipping by it.
//
// Norms are summed in double over fixed blocks of each parameter's elements, by index, and in the
// order of the parameters: the bits depend neither on the number of threads nor on where tensors
// lie or how they are strided. On CUDA torch reduces each gradient, and only the order of the
// parameters is fixed; over several ranks the group's backend adds up. Parameters without a
// gradient do not count; no gradients have norm 0.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <utility>

#include "lockstep/comm/group.h"
#include "lockstep/core/torch_fwd.h"

namespace lockstep::optim {

enum class NormType { l2, max };

struct NormOptions {
  NormType type = NormType::l2;
  // Throw Error when the norm is infinite or NaN, before any gradient is changed.
  bool error_if_nonfinite = false;
  // Ranks that hold other parts of the same gradients, every element on exactly one of them: the
  // norm is that of all of it, and the same on every rank. Collective.
  comm::Group group = {};
  // Bits that do not depend on how the gradients are cut into tensors and ranks either, nor on the
  // backend and the device, at about a quarter of the speed: for reproducible training.
  bool exact = false;
};

// The norm of all gradients as one vector.
double grad_norm(std::span<const at::Tensor> parameters, NormOptions options = {});

// Scales gradients, in place, so that their norm is at most `max_norm`, and returns the norm
// before. As torch does, a norm that is infinite makes finite gradients 0, and one that is NaN
// makes all NaN; step_guard.h skips such steps.
double clip_grad_norm_(std::span<const at::Tensor> parameters, double max_norm,
                       NormOptions options = {});
// The same for the parameters of a module, given as *model or as its holder.
double clip_grad_norm_(torch::nn::Module& model, double max_norm, NormOptions options = {});
template <class T>
double clip_grad_norm_(const torch::nn::ModuleHolder<T>& model, double max_norm,
                       NormOptions options = {}) {
  return clip_grad_norm_(*model.ptr(), max_norm, std::move(options));
}
// The same with a norm that is known: that of all shards of a model.
void clip_grad_with_norm(std::span<const at::Tensor> parameters, double max_norm, double norm);

// What it multiplies gradients by, at most 1.
double clip_factor(double max_norm, double norm);

// Limits every element to [-max_value, max_value], in place.
void clip_grad_value_(std::span<const at::Tensor> parameters, double max_value);

}  // namespace lockstep::optim
