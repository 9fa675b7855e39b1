// SPDX-License-Identifier: Apache-2.0
// A product of two matrices by cuBLASLt. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace lockstep::nn::cuda {

struct ProductOptions {
  at::ScalarType type = at::kBFloat16;    // of the result
  at::Tensor bias = {};                   // (columns of the result), or undefined
  at::Tensor added = {};                  // as large as the result, or undefined
  at::Tensor into = {};                   // where the result is written, or undefined
  at::Tensor a_scale = {}, b_scale = {};  // float32 (1), of 8-bit floats
  bool fast = false;                      // sums of 8-bit products in fewer bits
};

// Whether time_products() is on, and runs need not be alike.
bool products_are_timed(c10::Device device);

// a (M, K) times b (K, N), plus what the options add, by the algorithm that was fastest when such
// sizes came first. It may be written into what is added. None where cuBLASLt does not take the
// tensors, or where nothing may be timed: a graph is being recorded, or so many sizes were timed
// that more are to be expected.
std::optional<at::Tensor> timed_product(const at::Tensor& a, const at::Tensor& b,
                                        const ProductOptions& options);

}  // namespace lockstep::nn::cuda
