// SPDX-License-Identifier: Apache-2.0
// Kernels for tensors on CUDA devices, in builds that have them; random_no_cuda.cpp stands in where
// they are not built. Tensors are contiguous; the work is queued on the current stream.
#pragma once

#include "lockstep/core/torch_fwd.h"
#include "lockstep/nn/random/random_kernels.h"

namespace lockstep::nn::cuda {

bool is_available();
void fill(const at::Tensor& out, const RandomKey& key, const Distribution& distribution,
          const Runs& runs);
void drop(const at::Tensor& in, const at::Tensor& out, const RandomKey& key, const Drop& drop,
          const Runs& runs);

}  // namespace lockstep::nn::cuda
