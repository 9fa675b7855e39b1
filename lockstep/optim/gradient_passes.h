// SPDX-License-Identifier: Apache-2.0
// Passes over the gradients of many parameters. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <span>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/optim/clip.h"

namespace lockstep::optim {

// Call it before a kernel reads a gradient through its pointer: where the gradient is offloaded,
// its owner restores the memory. No-op for other tensors.
void announce_read(const at::Tensor& gradient);
// Call it after the last such use: where the gradient is compressed between its uses, its owner
// does that. It notices what was written.
void announce_done(const at::Tensor& gradient);

namespace detail {

// The gradients that are there, as strided tensors that share their memory: of a sparse one the
// values, after it was coalesced. A parameter that is listed twice has one gradient. Their memory
// need not be there yet: for_each_part().
std::vector<at::Tensor> gradients_of(std::span<const at::Tensor> parameters);

// Calls `body` for one part of the gradients after the other, in their order, while their memory is
// there: those that are always in memory together, those that an owner restores one owner at a
// time.
void for_each_part(std::span<const at::Tensor> gradients,
                   const std::function<void(std::span<const at::Tensor>)>& body);

// Over all ranks of the group. Collective.
double norm_of(std::span<const at::Tensor> gradients, NormType type, const comm::Group& group);

void scale(std::span<const at::Tensor> gradients, double factor);
// In the same pass: the largest magnitude of the result, NaN if there is one.
double scale_and_measure(std::span<const at::Tensor> gradients, double factor);

// Collective, one small all-reduce.
bool any_rank(bool mine, const comm::Group& group);

}  // namespace detail
}  // namespace lockstep::optim
