// SPDX-License-Identifier: Apache-2.0
// Small models that can be cloned, and what tests of their replicas share.
#pragma once

#include <ATen/ATen.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/core/error.h"

namespace lockstep::parallel {

inline std::vector<c10::Device> cpus(size_t count) {
  return std::vector<c10::Device>(count, at::kCPU);
}

inline at::Tensor random(at::IntArrayRef sizes, uint64_t seed) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed));
}

// Smooth: a kink would turn a difference in the last bit into one in the first. Seeded, as torch's
// own generator is not.
struct Mlp {
  static torch::nn::Sequential make() {
    torch::manual_seed(1);
    return torch::nn::Sequential(torch::nn::Linear(6, 16), torch::nn::Functional(at::tanh),
                                 torch::nn::Linear(16, 3));
  }
  static at::Tensor input(int64_t rows, uint64_t seed) { return random({rows, 6}, seed); }
};

class ConvNetImpl : public torch::nn::Cloneable<ConvNetImpl> {
 public:
  ConvNetImpl() { reset(); }
  void reset() override {
    conv = register_module("conv", torch::nn::Conv2d(2, 4, 3));
    head = register_module("head", torch::nn::Linear(4 * 4 * 4, 3));
  }
  at::Tensor forward(const at::Tensor& x) {
    return head->forward(at::tanh(conv->forward(x)).flatten(1));
  }

  torch::nn::Conv2d conv{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(ConvNet);

struct Conv {
  static ConvNet make() {
    torch::manual_seed(2);
    return ConvNet();
  }
  static at::Tensor input(int64_t rows, uint64_t seed) { return random({rows, 2, 6, 6}, seed); }
};

inline at::Tensor target(int64_t rows, uint64_t seed) { return random({rows, 3}, seed + 1000); }

template <class Model>
Model copy_of(const Model& model) {
  return Model(std::dynamic_pointer_cast<typename Model::ContainedType>(model->clone()));
}

inline double difference(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

// Over the parameters of two models, or over what `of` makes of them.
template <class Model, class Of = std::identity>
double largest_difference(const Model& a, const Model& b, Of of = {}) {
  double largest = 0;
  const auto as = a->parameters(), bs = b->parameters();
  for (size_t i = 0; i < as.size(); ++i) {
    largest = std::max(largest, difference(of(as[i]), of(bs[i])));
  }
  return largest;
}

template <class Error = ConfigError, class Call>
std::string message_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

}  // namespace lockstep::parallel
