// SPDX-License-Identifier: Apache-2.0
// Kernels that do on CUDA in one pass what takes several of torch's, in builds that have them;
// fused_no_cuda.cpp stands in where they are not built. Private: not installed. Tensors are
// contiguous unless said otherwise; work is queued on the current stream.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace lockstep::nn::cuda {

// Whether the functions below take tensors like this one.
bool has_fused_kernels(const at::Tensor& tensor);

// Whether torch's flash attention with documents of different lengths takes heads like these,
// (1, H, N, D).
bool has_flash_attention(const at::Tensor& heads);

// Turns the first `rotated` heads of qkv (B, T, n * D), and copies the others, to `out`: a tensor
// of the same strides, or qkv itself.
void rotate_heads(const at::Tensor& qkv, const at::Tensor& rotation, int64_t rotated,
                  const at::Tensor& out);
// Gradients (B, n, T, D) of any strides to that of qkv; those of q and k are turned back.
at::Tensor merge_heads(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const at::Tensor& rotation);

// Whether rms_norm() takes rows like these. The weight must be in memory: a kernel reads it unseen.
bool has_rms_norm(const at::Tensor& x, const at::Tensor& weight);
struct RmsNormResult {
  at::Tensor out;
  at::Tensor scales;  // float32, of each row: for backward
};
RmsNormResult rms_norm(const at::Tensor& x, const at::Tensor& weight, double epsilon);
struct RmsNormGradients {
  at::Tensor x, weight;  // undefined where they are not wanted
};
// `around` is the gradient of x by another way, which is added, or undefined. Both may have any
// strides.
RmsNormGradients rms_norm_backward(const at::Tensor& x, const at::Tensor& weight,
                                   const at::Tensor& scales, const at::Tensor& grad,
                                   const at::Tensor& around, bool wants_x, bool wants_weight);

at::Tensor swiglu(const at::Tensor& gate_up);
at::Tensor swiglu_backward(const at::Tensor& gate_up, const at::Tensor& grad);

// Whether embedding_gradient() computes gradients of tables like this one, which must be in memory.
bool has_embedding_gradient(const at::Tensor& table);
// That of a table of `rows` rows, from the gradients of those that were looked up, of any strides.
at::Tensor embedding_gradient(const at::Tensor& gradient, const at::Tensor& indices, int64_t rows);

// Returns scale * loss of each row, and writes the logits' gradient, which may be their memory.
at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets, int64_t ignored,
                         double scale, const at::Tensor& gradient);
// In place; the factor is a float32 scalar on the device, and nothing is touched where it is 1.
void scale_unless_one(const at::Tensor& tensor, const at::Tensor& factor);

}  // namespace lockstep::nn::cuda
