// SPDX-License-Identifier: Apache-2.0
#include "lockstep/core/error.h"
#include "lockstep/nn/random/random_cuda.h"

namespace lockstep::nn::cuda {

bool is_available() { return false; }

void fill(const at::Tensor&, const RandomKey&, const Distribution&, const Runs&) {
  check(false, "CUDA kernels are not in this build");
}

void drop(const at::Tensor&, const at::Tensor&, const RandomKey&, const Drop&, const Runs&) {
  check(false, "CUDA kernels are not in this build");
}

}  // namespace lockstep::nn::cuda
