// SPDX-License-Identifier: Apache-2.0
// Norms of the last dimension.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <ostream>

namespace lockstep::nn {

struct NormOptions {
  double epsilon = 1e-5;
  at::TensorOptions tensors = {};
};

// To mean 0 and variance 1, then weight and bias; as torch::nn::LayerNorm.
class LayerNormImpl : public torch::nn::Cloneable<LayerNormImpl> {
 public:
  explicit LayerNormImpl(int64_t width, NormOptions options = {});

  at::Tensor forward(const at::Tensor& input);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  at::Tensor weight, bias;  // (width)

 private:
  int64_t width_;
  NormOptions options_;
};

class LayerNorm : public torch::nn::ModuleHolder<LayerNormImpl> {
 public:
  using torch::nn::ModuleHolder<LayerNormImpl>::ModuleHolder;
  explicit LayerNorm(int64_t width, NormOptions options = {})
      : ModuleHolder(std::make_shared<LayerNormImpl>(width, options)) {}
};

// To root mean square 1, then weight.
class RmsNormImpl : public torch::nn::Cloneable<RmsNormImpl> {
 public:
  explicit RmsNormImpl(int64_t width, NormOptions options = {});

  at::Tensor forward(const at::Tensor& input);
  // The norm, and the input for what goes around it: backward adds the gradients of both in one
  // pass where the device has a kernel for it.
  struct Fork {
    at::Tensor out, input;
  };
  Fork fork(const at::Tensor& input);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  at::Tensor weight;  // (width)

 private:
  int64_t width_;
  NormOptions options_;
};

class RmsNorm : public torch::nn::ModuleHolder<RmsNormImpl> {
 public:
  using torch::nn::ModuleHolder<RmsNormImpl>::ModuleHolder;
  explicit RmsNorm(int64_t width, NormOptions options = {})
      : ModuleHolder(std::make_shared<RmsNormImpl>(width, options)) {}
};

}  // namespace lockstep::nn
