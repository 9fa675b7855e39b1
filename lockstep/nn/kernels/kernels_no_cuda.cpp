// SPDX-License-Identifier: Apache-2.0
#include <ATen/core/Tensor.h>

#include <stdexcept>

#include "lockstep/nn/kernels/decode_cuda.h"
#include "lockstep/nn/kernels/fused_cuda.h"
#include "lockstep/nn/kernels/product_cuda.h"

namespace lockstep::nn::cuda {
namespace {

[[noreturn]] void missing() {
  throw std::logic_error("lockstep bug: no CUDA kernels in this build");
}

}  // namespace

bool has_fused_kernels(const at::Tensor&) { return false; }
bool has_flash_attention(const at::Tensor&) { return false; }
void rotate_heads(const at::Tensor&, const at::Tensor&, int64_t, const at::Tensor&) { missing(); }
at::Tensor merge_heads(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&) {
  missing();
}
bool has_rms_norm(const at::Tensor&, const at::Tensor&) { return false; }
RmsNormResult rms_norm(const at::Tensor&, const at::Tensor&, double) { missing(); }
RmsNormGradients rms_norm_backward(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                   const at::Tensor&, const at::Tensor&, bool, bool) {
  missing();
}
at::Tensor swiglu(const at::Tensor&) { missing(); }
at::Tensor swiglu_backward(const at::Tensor&, const at::Tensor&) { missing(); }
bool has_embedding_gradient(const at::Tensor&) { return false; }
at::Tensor embedding_gradient(const at::Tensor&, const at::Tensor&, int64_t) { missing(); }
at::Tensor cross_entropy(const at::Tensor&, const at::Tensor&, int64_t, double, const at::Tensor&) {
  missing();
}
void scale_unless_one(const at::Tensor&, const at::Tensor&) { missing(); }

std::optional<at::Tensor> timed_product(const at::Tensor&, const at::Tensor&,
                                        const ProductOptions&) {
  return {};
}

bool has_decode_kernels(const at::Tensor&) { return false; }
at::Tensor few_linear(const at::Tensor&, const FusedLinear&) { missing(); }
bool can_attend(c10::Device, int64_t, int64_t, int64_t) { return false; }
at::Tensor attend_new(const at::Tensor&, const AttentionHeads&, const NewTokens&, AttentionMemory&,
                      int64_t) {
  missing();
}

}  // namespace lockstep::nn::cuda
