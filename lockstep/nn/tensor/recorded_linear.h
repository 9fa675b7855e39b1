// SPDX-License-Identifier: Apache-2.0
// A linear map whose backward is ours: whole, or of outputs that ranks share. Private: not
// installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "lockstep/nn/tensor/sharing.h"

namespace lockstep::nn {

struct LinearCall {
  at::Tensor bias = {};                 // (out), or undefined
  at::Tensor added = {};                // as large as the result, or undefined; not with sharing
  std::optional<Sharing> sharing = {};  // of the weight among ranks
  bool adds_gradient = false;           // as LinearImpl::adds_gradient says
};

// (..., in) x (out, in) -> (..., out). With sharing, these are this rank's outputs, and backward
// sums the gradient of the input over the ranks while it computes that of the weight.
at::Tensor recorded_linear(const at::Tensor& input, const at::Tensor& weight,
                           const LinearCall& call);

// (..., n) -> (rows, n)
inline at::Tensor as_matrix(const at::Tensor& tensor) {
  return tensor.reshape({-1, tensor.size(-1)});
}

}  // namespace lockstep::nn
