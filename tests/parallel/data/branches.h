// SPDX-License-Identifier: Apache-2.0
// A model whose gradients tests can foretell, and what its ranks throw.
#pragma once

#include <ATen/ATen.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <string>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/core/error.h"

namespace lockstep::test {

// Three weights, of which a forward uses those it is told to. d(loss)/d(w) is `scale`.
class BranchesImpl : public torch::nn::Module {
 public:
  explicit BranchesImpl(int branches = 3, int64_t size = 4) {
    for (int i = 0; i < branches; ++i)
      weights.push_back(register_parameter("w" + std::to_string(i), at::zeros({size})));
  }
  at::Tensor forward(const std::vector<int>& used, double scale) {
    at::Tensor sum = at::zeros({});
    for (const int i : used) sum = sum + weights[static_cast<size_t>(i)].sum() * scale;
    return sum;
  }
  std::vector<at::Tensor> weights;
};
TORCH_MODULE(Branches);

inline double gradient(const Branches& model, size_t i) {
  const at::Tensor grad = model->weights[i].grad();
  return grad.defined() ? grad[0].item<double>() : -1;
}

// What each rank's body threw, "" if nothing.
inline std::vector<std::string> errors_of(int ranks, const std::function<void(comm::Group)>& body) {
  std::vector<std::string> errors(static_cast<size_t>(ranks));
  comm::run_threads(ranks, [&](comm::Group group) {
    try {
      body(group);
    } catch (const Error& error) {
      errors[static_cast<size_t>(group.rank())] = error.what();
    }
  });
  return errors;
}

}  // namespace lockstep::test
