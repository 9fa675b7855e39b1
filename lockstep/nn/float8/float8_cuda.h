// SPDX-License-Identifier: Apache-2.0
// What float8.h offers, on a GPU. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <tuple>

#include "lockstep/nn/float8/float8.h"

namespace lockstep::nn::cuda {

std::string float8_missing(c10::Device device);
at::Tensor float8_amax(const at::Tensor& matrix);
std::tuple<at::Tensor, at::Tensor, at::Tensor> float8_cast(const at::Tensor& matrix,
                                                           const at::Tensor& amax, Float8 kind,
                                                           Float8Layout layout);
at::Tensor float8_transpose(const at::Tensor& codes);
at::Tensor float8_product(const Float8Operand& a, const Float8Operand& b,
                          const Float8ProductOptions& options);

}  // namespace lockstep::nn::cuda
