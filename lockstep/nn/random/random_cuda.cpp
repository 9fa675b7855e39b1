// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/random/random_cuda.h"

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "lockstep/memory/tensor_bytes.h"

namespace lockstep::nn::cuda {

bool is_available() { return true; }

void fill(const at::Tensor& out, const RandomKey& key, const Distribution& distribution,
          const Runs& runs) {
  const c10::cuda::CUDAGuard guard(out.device());
  launch_fill(key, distribution, runs, memory::dtype_of(out, "fill"), out.data_ptr(),
              c10::cuda::getCurrentCUDAStream().stream());
}

void drop(const at::Tensor& in, const at::Tensor& out, const RandomKey& key, const Drop& drop,
          const Runs& runs) {
  const c10::cuda::CUDAGuard guard(out.device());
  launch_drop(key, drop, runs, memory::dtype_of(out, "dropout"), in.data_ptr(), out.data_ptr(),
              c10::cuda::getCurrentCUDAStream().stream());
}

}  // namespace lockstep::nn::cuda
