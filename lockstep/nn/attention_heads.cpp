// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/attention_heads.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/nn/autograd/one_derivative.h"
#include "lockstep/nn/autograd/product.h"
#include "lockstep/nn/kernels/fused_cuda.h"

namespace lockstep::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

void check_shapes(const at::Tensor& qkv, const HeadOptions& options) {
  const int64_t heads = options.heads + 2 * options.kv_heads;
  if (qkv.dim() != 3 || options.heads < 1 || options.kv_heads < 1 || qkv.size(2) % heads != 0) {
    throw ConfigError(format("[split_heads] qkv is ({}), must be (B, T, ({} + 2 x {}) x D)",
                             join(qkv.sizes()), options.heads, options.kv_heads));
  }
  if (!options.q_norm != !options.k_norm) {
    throw ConfigError("[split_heads] q_norm and k_norm must both be given or both be empty");
  }
  if (!options.rotation.defined()) return;
  const int64_t width = qkv.size(2) / heads;
  const auto sizes = options.rotation.sizes();
  if (sizes.size() != 3 || sizes[0] != 2 || sizes[1] < qkv.size(1) || 2 * sizes[2] != width) {
    throw ConfigError(format("[split_heads] the rotation is ({}), must be (2, at least {}, {} / 2)",
                             join(sizes), qkv.size(1), width));
  }
}

// (B, T, n * D) -> (B, T, n, D)
at::Tensor by_head(const at::Tensor& part, int64_t width) {
  return part.view({part.size(0), part.size(1), -1, width});
}
// (B, T, n * D) -> (B, n, T, D)
at::Tensor as_heads(const at::Tensor& part, int64_t width) {
  return by_head(part, width).transpose(1, 2);
}

// q, k and v side by side, as (B, T, n * D).
std::vector<at::Tensor> parts_of(const at::Tensor& qkv, const HeadOptions& options) {
  const int64_t width = qkv.size(2) / (options.heads + 2 * options.kv_heads);
  return qkv.split_with_sizes(
      {options.heads * width, options.kv_heads * width, options.kv_heads * width}, 2);
}

// The same qkv with the norms applied.
at::Tensor normalized(const at::Tensor& qkv, const HeadOptions& options) {
  const int64_t width = qkv.size(2) / (options.heads + 2 * options.kv_heads);
  const auto parts = parts_of(qkv, options);
  return at::cat({options.q_norm(by_head(parts[0], width)).flatten(2),
                  options.k_norm(by_head(parts[1], width)).flatten(2), parts[2]},
                 2);
}

at::Tensor rotate(const at::Tensor& x, const at::Tensor& rotation) {
  const int64_t half = x.size(3) / 2, length = x.size(2);
  const at::Tensor table = rotation.narrow(1, 0, length).to(x.scalar_type());
  const at::Tensor cosine = table[0], sine = table[1];
  const at::Tensor a = x.narrow(3, 0, half), b = x.narrow(3, half, half);
  return at::cat({a * cosine - b * sine, b * cosine + a * sine}, -1);
}

Heads split_by_operators(const at::Tensor& qkv, const HeadOptions& options) {
  const int64_t width = qkv.size(2) / (options.heads + 2 * options.kv_heads);
  const auto parts = parts_of(qkv, options);
  Heads heads{as_heads(parts[0], width), as_heads(parts[1], width), as_heads(parts[2], width)};
  if (options.q_norm) {
    heads.q = options.q_norm(by_head(parts[0], width)).transpose(1, 2);
    heads.k = options.k_norm(by_head(parts[1], width)).transpose(1, 2);
  }
  if (options.rotation.defined()) {
    heads.q = rotate(heads.q, options.rotation);
    heads.k = rotate(heads.k, options.rotation);
  }
  return heads;
}

// One kernel each way: backward puts the three gradients back together while it turns them.
struct RotateAndSplit : torch::autograd::Function<RotateAndSplit> {
  static variable_list forward(AutogradContext* context, const at::Tensor& qkv,
                               const at::Tensor& rotation, int64_t heads, int64_t kv_heads,
                               bool overwrite) {
    const int64_t width = qkv.size(2) / (heads + 2 * kv_heads);
    const at::Tensor from = qkv.detach().contiguous();
    const at::Tensor turned = overwrite ? from : at::empty_like(from);
    cuda::rotate_heads(from, rotation, heads + kv_heads, turned);
    context->saved_data["rotation"] = rotation;
    const auto parts =
        turned.split_with_sizes({heads * width, kv_heads * width, kv_heads * width}, 2);
    return {as_heads(parts[0], width), as_heads(parts[1], width), as_heads(parts[2], width)};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    require_one_derivative("split_heads");
    const at::Tensor rotation = context->saved_data["rotation"].toTensor();
    return {cuda::merge_heads(gradients[0], gradients[1], gradients[2], rotation), at::Tensor(),
            at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

Heads split_heads(const at::Tensor& qkv, const HeadOptions& options) {
  check_shapes(qkv, options);
  if (!options.rotation.defined() || !cuda::has_fused_kernels(qkv)) {
    return split_by_operators(qkv, options);
  }
  // A product that is kept for the second call of a recomputed function stays as it is.
  const bool overwrite = options.overwrite && product_keeper() == nullptr;
  const auto heads =
      RotateAndSplit::apply(options.q_norm ? normalized(qkv, options) : qkv, options.rotation,
                            options.heads, options.kv_heads, overwrite);
  return {heads[0], heads[1], heads[2]};
}

at::Tensor rotary_table(std::span<const double> frequencies, int64_t positions) {
  const at::Tensor frequency =
      at::tensor(at::ArrayRef<double>(frequencies.data(), frequencies.size()), at::kDouble);
  const at::Tensor angles = at::outer(at::arange(positions, at::kDouble), frequency);
  return at::stack({angles.cos(), angles.sin()}).to(at::kFloat);
}

}  // namespace lockstep::nn
