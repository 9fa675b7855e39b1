// SPDX-License-Identifier: Apache-2.0
// Passes over the gradients of many parameters. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/optim/clip.h"

namespace lockstep::optim {

// Call it before a kernel reads a gradient through its pointer: where the gradient is offloaded,
// its owner restores the memory. No-op for other tensors.
void announce_read(const at::Tensor& gradient);

namespace detail {

// The gradients that are there, as strided tensors that share their memory: of a sparse one the
// values, after it was coalesced. A parameter that is listed twice has one gradient.
std::vector<at::Tensor> gradients_of(std::span<const at::Tensor> parameters);

// Over all ranks of the group. Collective.
double norm_of(std::span<const at::Tensor> gradients, NormType type, const comm::Group& group);

void scale(std::span<const at::Tensor> gradients, double factor);
// In the same pass: the largest magnitude of the result, NaN if there is one.
double scale_and_measure(std::span<const at::Tensor> gradients, double factor);

// Collective, one small all-reduce.
bool any_rank(bool mine, const comm::Group& group);

}  // namespace detail
}  // namespace lockstep::optim
