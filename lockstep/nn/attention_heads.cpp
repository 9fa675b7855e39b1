// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/attention_heads.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/memory/threads/parallel_for.h"
#include "lockstep/nn/autograd/one_derivative.h"
#include "lockstep/nn/autograd/product.h"
#include "lockstep/nn/kernels/activation_kernels.h"
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

// Whether turn_heads() can turn heads of this qkv.
bool has_cpu_kernel(const at::Tensor& qkv, const at::Tensor& rotation) {
  return qkv.is_cpu() && qkv.scalar_type() == at::kFloat && rotation.is_cpu() &&
         rotation.scalar_type() == at::kFloat && rotation.stride(2) == 1;
}

// Writes heads (B, n, T, D) to others, turned by the angles of the table times sign. The bits are
// those of rotate() and its backward. Only the last dimensions must be dense.
void turn_heads(const at::Tensor& from, const at::Tensor& to, const at::Tensor& rotation,
                float sign) {
  constexpr int64_t kGrain = 1 << 15;
  const int64_t heads = from.size(1), length = from.size(2), width = from.size(3);
  const auto row = [](const at::Tensor& tensor, int64_t batch, int64_t position) {
    return tensor.data_ptr<float>() + batch * tensor.stride(0) + position * tensor.stride(2);
  };
  const float* const cosines = rotation.data_ptr<float>();
  const float* const sines = cosines + rotation.stride(0);
  memory::parallel_for(from.size(0) * length, std::max<int64_t>(kGrain / (heads * width), 1),
                       [&](int64_t begin, int64_t end) {
                         for (int64_t i = begin; i < end; ++i) {
                           const int64_t batch = i / length, position = i % length;
                           const float* const in = row(from, batch, position);
                           float* const out = row(to, batch, position);
                           const int64_t angles = position * rotation.stride(1);
                           for (int64_t head = 0; head < heads; ++head) {
                             activation_kernels().rotate(in + head * from.stride(1),
                                                         cosines + angles, sines + angles, sign,
                                                         out + head * to.stride(1), width / 2);
                           }
                         }
                       });
}

// The heads one after the other, each in one piece: qkv need not be kept for the attention.
struct RotateAndSplitOnCpu : torch::autograd::Function<RotateAndSplitOnCpu> {
  static variable_list forward(AutogradContext* context, const at::Tensor& qkv,
                               const at::Tensor& rotation, int64_t heads, int64_t kv_heads) {
    context->saved_data["rotation"] = rotation;
    const auto parts = parts_of(qkv.contiguous(), {.heads = heads, .kv_heads = kv_heads});
    const int64_t width = 2 * rotation.size(2);
    const auto turned = [&](const at::Tensor& part) {
      const at::Tensor from = as_heads(part, width);
      at::Tensor to = at::empty(from.sizes(), from.options());
      turn_heads(from, to, rotation, 1);
      return to;
    };
    const at::Tensor v = as_heads(parts[2], width);
    return {turned(parts[0]), turned(parts[1]), v.clone(at::MemoryFormat::Contiguous)};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    require_one_derivative("split_heads");
    const at::Tensor rotation = context->saved_data["rotation"].toTensor();
    const at::Tensor &q = gradients[0], &k = gradients[1], &v = gradients[2];
    const int64_t heads = q.size(1), kv_heads = k.size(1), width = q.size(3);
    const at::Tensor out =
        at::empty({q.size(0), q.size(2), (heads + 2 * kv_heads) * width}, q.options());
    const auto parts = parts_of(out, {.heads = heads, .kv_heads = kv_heads});
    const auto dense = [](const at::Tensor& part) {
      return part.stride(3) == 1 ? part : part.contiguous();
    };
    turn_heads(dense(q), as_heads(parts[0], width), rotation, -1);
    turn_heads(dense(k), as_heads(parts[1], width), rotation, -1);
    as_heads(parts[2], width).copy_(v);
    return {out, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

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
  const bool on_cuda = cuda::has_fused_kernels(qkv);
  if (!options.rotation.defined() || (!on_cuda && !has_cpu_kernel(qkv, options.rotation))) {
    return split_by_operators(qkv, options);
  }
  const at::Tensor& rotation = options.rotation;
  const at::Tensor normed = options.q_norm ? normalized(qkv, options) : qkv;
  // A product that is kept for the second call of a recomputed function stays as it is.
  const bool overwrite = options.overwrite && product_keeper() == nullptr;
  const auto heads =
      on_cuda ? RotateAndSplit::apply(normed, rotation, options.heads, options.kv_heads, overwrite)
              : RotateAndSplitOnCpu::apply(normed, rotation, options.heads, options.kv_heads);
  return {heads[0], heads[1], heads[2]};
}

at::Tensor rotary_table(std::span<const double> frequencies, int64_t positions) {
  const at::Tensor frequency =
      at::tensor(at::ArrayRef<double>(frequencies.data(), frequencies.size()), at::kDouble);
  const at::Tensor angles = at::outer(at::arange(positions, at::kDouble), frequency);
  return at::stack({angles.cos(), angles.sin()}).to(at::kFloat);
}

}  // namespace lockstep::nn
