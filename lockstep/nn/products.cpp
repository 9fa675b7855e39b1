// SPDX-License-Identifier: Apache-2.0
// Kernels for the key that comes directly before those of the devices, which every tensor has: a
// scope or an extra key on tensors would not reach autograd's threads and the caller's own tensors.
#include "lockstep/nn/linear.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/mm_ops.h>
#include <torch/library.h>

#include <atomic>

#include "lockstep/nn/float8/scaled_mm.h"
#include "lockstep/nn/kernels/product_cuda.h"

#if LOCKSTEP_HAS_SCALED_MM
#include <ATen/ops/_scaled_mm_ops.h>
#endif

namespace lockstep::nn {
namespace {

constexpr auto kKey = c10::DispatchKey::BackendSelect;

std::atomic<bool> is_on = false;

c10::DispatchKeySet below(c10::DispatchKeySet keys) {
  return keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey);
}

at::Tensor mm(c10::DispatchKeySet keys, const at::Tensor& a, const at::Tensor& b) {
  if (cuda::products_are_timed(a.device())) {
    if (const auto out = cuda::timed_product(a, b, {.type = a.scalar_type()})) return *out;
  }
  return at::_ops::mm::redispatch(below(keys), a, b);
}

at::Tensor addmm(c10::DispatchKeySet keys, const at::Tensor& added, const at::Tensor& a,
                 const at::Tensor& b, const at::Scalar& beta, const at::Scalar& alpha) {
  if (cuda::products_are_timed(a.device()) && beta.equal(1) && alpha.equal(1)) {
    cuda::ProductOptions options{.type = a.scalar_type()};
    (added.dim() == 1 ? options.bias : options.added) = added;
    if (const auto out = cuda::timed_product(a, b, options)) return *out;
  }
  return at::_ops::addmm::redispatch(below(keys), added, a, b, beta, alpha);
}

#if LOCKSTEP_HAS_SCALED_MM
at::Tensor scaled_mm(c10::DispatchKeySet keys, const at::Tensor& a, const at::Tensor& b,
                     const at::Tensor& a_scale, const at::Tensor& b_scale,
                     const std::optional<at::Tensor>& bias,
                     const std::optional<at::Tensor>& result_scale,
                     std::optional<at::ScalarType> type, bool fast) {
  const bool whole = a_scale.numel() == 1 && b_scale.numel() == 1 && !result_scale &&
                     a_scale.scalar_type() == at::kFloat && b_scale.scalar_type() == at::kFloat;
  if (cuda::products_are_timed(a.device()) && whole && type && *type == at::kBFloat16) {
    if (const auto out = cuda::timed_product(a, b,
                                             {.type = *type,
                                              .bias = bias.value_or(at::Tensor()),
                                              .a_scale = a_scale,
                                              .b_scale = b_scale,
                                              .fast = fast}))
      return *out;
  }
  return at::_ops::_scaled_mm::redispatch(below(keys), a, b, a_scale, b_scale, bias, result_scale,
                                          type, fast);
}
#endif

torch::Library registered() {
  torch::Library made(torch::Library::IMPL, "aten", kKey, "Lockstep", __LINE__);
  made.impl("mm", TORCH_FN(mm));
  made.impl("addmm", TORCH_FN(addmm));
#if LOCKSTEP_HAS_SCALED_MM
  made.impl("_scaled_mm", TORCH_FN(scaled_mm));
#endif
  return made;
}

}  // namespace

void time_products(bool on) {
  if (on && at::hasCUDA()) static const torch::Library library = registered();
  is_on = on;
}

bool cuda::products_are_timed(c10::Device device) {
  return is_on && device.is_cuda() && !at::globalContext().deterministicAlgorithms();
}

}  // namespace lockstep::nn
