// SPDX-License-Identifier: Apache-2.0
// A linear map whose outputs tensor-parallel ranks share. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include "lockstep/nn/tensor/sharing.h"

namespace lockstep::nn {

// This rank's outputs. In backward the sum over ranks of the input's gradient travels while the
// weight's gradient is computed. With sequence parallelism the input is this rank's part, and of
// the whole of it nothing is kept: backward gathers it again, overlapped with the first product.
at::Tensor column_linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                         const Sharing& sharing);

}  // namespace lockstep::nn
