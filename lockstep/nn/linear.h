// SPDX-License-Identifier: Apache-2.0
// A linear map of the last dimension.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <memory>
#include <ostream>

#include "lockstep/nn/tensor/sharing.h"

namespace lockstep::nn {

class Float8Weight;

struct LinearOptions {
  bool bias = true;
  at::TensorOptions tensors = {};  // dtype and device of the parameters
};

// Computes what torch::nn::Linear does; shared by tensor-parallel ranks, of the outputs (column)
// this rank's, or from this rank's inputs (row) what all have. Parameters begin without values:
// initialize() gives them.
class LinearImpl : public torch::nn::Cloneable<LinearImpl>, public SharedLayer {
 public:
  LinearImpl(int64_t in, int64_t out, LinearOptions options = {});

  at::Tensor forward(const at::Tensor& input);  // (..., in) -> (..., out)

  bool supports(layout::TensorStyle style) const override;
  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  at::Tensor weight;  // (out, in)
  at::Tensor bias;    // (out), or undefined
  // Compute in 8-bit floats while gradients are recorded; the results have the input's type. Both
  // sizes, with tensor parallelism those of this rank's part, must be multiples of 16.
  bool float8 = false;
  // Keep the codes of the weight until its version changes: one cast for all micro-batches of a
  // step. Writes that leave the version as it is, such as those of torch::optim::SGD, of
  // `weight.data()` and of collectives, are then not seen.
  bool float8_cached = false;

 private:
  int64_t in_, out_;
  LinearOptions options_;
  std::shared_ptr<Float8Weight> float8_weight_;
};

class Linear : public torch::nn::ModuleHolder<LinearImpl> {
 public:
  using torch::nn::ModuleHolder<LinearImpl>::ModuleHolder;
  Linear(int64_t in, int64_t out, LinearOptions options = {})
      : ModuleHolder(std::make_shared<LinearImpl>(in, out, options)) {}
};

}  // namespace lockstep::nn
