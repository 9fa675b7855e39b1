// SPDX-License-Identifier: Apache-2.0
// Numbers that tell whether tensors have the same bits. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "lockstep/train/integrity/checksum_words.h"

namespace lockstep::train {

// One number of 64 bits for each tensor, as a tensor on the CPU. It depends on all bits and on
// their places, but not on strides and devices: every change of one bit changes it. One pass over
// the memory; tensors that are not contiguous are copied in pieces.
at::Tensor checksums(const std::vector<at::Tensor>& tensors);

namespace detail {

// Adds the words' sum to a number, in the order of the device's current stream. False, and nothing
// has been done, where this build has no kernel.
bool add_sum_on_gpu(const at::Tensor& tensor, const Words& words, const at::Tensor& sum);

}  // namespace detail

}  // namespace lockstep::train
