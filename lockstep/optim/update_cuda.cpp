// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optim/update_cuda.h"

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <vector>

#include "lockstep/optim/tensor_memory.h"

namespace lockstep::optim::detail::cuda {
namespace {

// Calls launch(parts, factors, stream) for each run of updates that one kernel makes.
template <class FactorsOf, class Launch>
void queue_updates(std::span<const Update> updates, const FactorsOf& factors_of,
                   const Launch& launch) {
  for (size_t begin = 0; begin < updates.size();) {
    const Update& first = updates[begin];
    const auto factors = factors_of(first);
    const auto is_alike = [&](const Update& other) {
      return other.param.device() == first.param.device() &&
             other.param.scalar_type() == first.param.scalar_type() &&
             other.grad.scalar_type() == first.grad.scalar_type() && factors_of(other) == factors;
    };
    std::vector<UpdatePart> parts;
    do {
      parts.push_back({operands_of(updates[begin]), updates[begin].param.numel()});
    } while (++begin < updates.size() && is_alike(updates[begin]));
    const c10::cuda::CUDAGuard guard(first.param.device());
    launch(parts, factors, *dtype_of(first.param), *dtype_of(first.grad),
           c10::cuda::getCurrentCUDAStream().stream());
  }
}

}  // namespace

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

void adamw(std::span<const Update> updates,
           const std::function<AdamWFactors(const Update&)>& factors_of) {
  queue_updates(updates, factors_of, launch_adamw);
}

void sgd(std::span<const Update> updates, SgdKind kind,
         const std::function<SgdFactors(const Update&)>& factors_of) {
  queue_updates(
      updates, factors_of,
      [kind](std::span<const UpdatePart> parts, const SgdFactors& factors, DType param, DType grad,
             void* stream) { launch_sgd(parts, kind, factors, param, grad, stream); });
}

}  // namespace lockstep::optim::detail::cuda
