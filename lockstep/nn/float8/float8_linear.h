// SPDX-License-Identifier: Apache-2.0
// A linear map whose three products, of forward and backward, are of 8-bit floats. Private: not
// installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "lockstep/nn/float8/float8.h"
#include "lockstep/nn/tensor/recorded_linear.h"

namespace lockstep::nn {

struct Float8Codes {
  Float8Operand operand;
  at::Tensor amax;
  bool kept;  // until the weight changes
};

// The codes of a weight, kept until its version changes: made once in a step, whatever the number
// of micro-batches. Of a sharded or offloaded weight, whose memory comes and goes, only the use
// that it is gathered for has codes.
class Float8Weight {
 public:
  Float8Codes of(const at::Tensor& weight, const std::optional<Sharing>& sharing);

 private:
  at::Tensor weight_;  // that the codes are of
  const void* data_ = nullptr;
  int64_t version_ = 0;
  Float8Codes codes_ = {};
};

// What recorded_linear() computes, or of a row-shared weight this rank's part of the sum, without
// the bias. Backward has the input as 8-bit codes. Every rank of a tensor-parallel group has the
// scales of the whole tensors. Without a place for its codes the weight is cast in each call.
at::Tensor float8_linear(const at::Tensor& input, const at::Tensor& weight, const LinearCall& call,
                         Float8Weight* codes);

}  // namespace lockstep::nn
