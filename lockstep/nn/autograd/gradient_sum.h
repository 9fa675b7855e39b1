// SPDX-License-Identifier: Apache-2.0
// Gradients of weights that a product adds to those of earlier micro-batches, in place of
// autograd, which would read and write both once more. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::nn {

// Of one weight. Without one, gradients are never added.
class GradientSum {
 public:
  GradientSum() = default;
  explicit GradientSum(const at::Tensor& weight) : weight_(weight) {}

  // In a backward function: weight.grad(), if all that autograd would do with a gradient of this
  // type is to add it there; undefined otherwise. Autograd is then given an undefined gradient.
  at::Tensor place(at::ScalarType type) const;

 private:
  at::Tensor weight_;
};

}  // namespace lockstep::nn
