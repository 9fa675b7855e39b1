// SPDX-License-Identifier: Apache-2.0
// Whether libtorch multiplies matrices of a type on a device. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::nn {

// Tried out, the first time: some builds promise a type and throw from matrices of 17 rows on.
bool can_multiply(at::ScalarType type, c10::Device device);

}  // namespace lockstep::nn
