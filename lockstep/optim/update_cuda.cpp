// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optim/update_cuda.h"

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>

#include "lockstep/optim/tensor_memory.h"

namespace lockstep::optim::detail::cuda {
namespace {

bool has_kernel(const Update& update) {
  const at::Tensor& param = update.param;
  const auto alike = [&](const at::Tensor& tensor) { return same_layout(tensor, param); };
  const bool known_grad = update.grad.scalar_type() == param.scalar_type() ||
                          update.grad.scalar_type() == update.weight().scalar_type();
  return param.is_cuda() && param.is_non_overlapping_and_dense() && known_grad &&
         alike(update.grad) && alike(update.weight()) &&
         std::all_of(update.buffers.begin(), update.buffers.end(), alike) &&
         update.grad.device() == param.device();
}

// launch(stream), unless there is nothing to update.
template <class Launch>
bool queue_update(const Update& update, const Launch& launch) {
  if (!has_kernel(update)) return false;
  if (update.param.numel() == 0) return true;
  const c10::cuda::CUDAGuard guard(update.param.device());
  launch(c10::cuda::getCurrentCUDAStream().stream());
  return true;
}

}  // namespace

bool adamw(const Update& update, const AdamWFactors& factors) {
  return queue_update(update, [&](void* stream) {
    launch_adamw(operands_of(update), factors, *dtype_of(update.param), *dtype_of(update.grad),
                 update.param.numel(), stream);
  });
}

bool sgd(const Update& update, SgdKind kind, const SgdFactors& factors) {
  return queue_update(update, [&](void* stream) {
    launch_sgd(operands_of(update), kind, factors, *dtype_of(update.param), *dtype_of(update.grad),
               update.param.numel(), stream);
  });
}

}  // namespace lockstep::optim::detail::cuda
