// SPDX-License-Identifier: Apache-2.0
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "lockstep/train/integrity/checksum.h"

namespace lockstep::train::detail {

bool add_sum_on_gpu(const at::Tensor& tensor, const Words& words, const at::Tensor& sum) {
  if (!tensor.is_cuda()) return false;
  const c10::cuda::CUDAGuard guard(tensor.device());
  launch_sum(words, sum.data_ptr<int64_t>(), c10::cuda::getCurrentCUDAStream().stream());
  return true;
}

}  // namespace lockstep::train::detail
