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
struct LinearCall;

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
  // sum + forward(input); on CUDA the product adds it where it can.
  at::Tensor add_to(const at::Tensor& sum, const at::Tensor& input);

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
  // Add the gradient of the weight to weight.grad() in the product that computes it, where a plain
  // backward() would add it there next: the sum is read and written once less in each micro-batch
  // after the first. Hooks on the weight see every gradient as before; post-hooks of its
  // AccumulateGrad node are called with an undefined gradient. For one backward at a time, and not
  // with create_graph.
  bool adds_gradient = false;

 private:
  bool is_row() const { return sharing && sharing->style == layout::TensorStyle::row; }
  at::Tensor multiply(const at::Tensor& input, LinearCall call);

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

// While on, products of bfloat16, float16 and 8-bit floats on CUDA (aten::mm, addmm and _scaled_mm
// of the whole process) are timed when their sizes come first: with the values
// at hand, by all algorithms that cuBLAS proposes. The fastest computes that product and all later
// ones of these sizes; cuBLAS's own choice is up to 20 % slower. The order of summation then
// depends on measured times, so two runs may differ in their last bits: the trainer has it on
// unless train.reproducible is true or train.time_products false. Ranks that compute the same
// product need not get the same bits. To be called before other threads multiply. Does nothing
// without CUDA, and where at::globalContext().deterministicAlgorithms() is true.
void time_products(bool on);

}  // namespace lockstep::nn
