// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optim/adamw_cuda.h"

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "lockstep/optim/tensor_memory.h"

namespace lockstep::optim::detail::cuda {

bool adamw(const Update& update, const AdamWFactors& factors) {
  const at::Tensor& param = update.param;
  const bool known_grad = update.grad.scalar_type() == param.scalar_type() ||
                          update.grad.scalar_type() == update.weight().scalar_type();
  const bool alike = same_layout(update.grad, param) && same_layout(update.weight(), param) &&
                     same_layout(update.buffers[0], param) && same_layout(update.buffers[1], param);
  if (!param.is_cuda() || !param.is_non_overlapping_and_dense() || !known_grad || !alike ||
      update.grad.device() != param.device()) {
    return false;
  }
  if (param.numel() == 0) return true;
  const c10::cuda::CUDAGuard guard(param.device());
  launch_adamw(operands_of(update), factors, *dtype_of(param), *dtype_of(update.grad),
               param.numel(), c10::cuda::getCurrentCUDAStream().stream());
  return true;
}

}  // namespace lockstep::optim::detail::cuda
