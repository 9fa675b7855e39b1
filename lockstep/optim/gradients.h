// SPDX-License-Identifier: Apache-2.0
// Passes over the gradients of many parameters. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/optim/clip.h"

namespace lockstep::optim::detail {

// Kernels read through pointers. Whoever put a key on a gradient, because its memory is not there,
// gets a call before.
void announce_read(const at::Tensor& gradient);

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

}  // namespace lockstep::optim::detail
