// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/kernels/decode_cuda.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "lockstep/memory/tensor_bytes.h"
#include "lockstep/nn/kernels/decode_launch.h"

namespace lockstep::nn::cuda {
namespace {

using Fused = FusedLinear::Activation;

const void* address(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.data_ptr() : nullptr;
}

Activation activation_of(Fused activation) {
  return activation == Fused::none   ? Activation::none
         : activation == Fused::gelu ? Activation::gelu
                                     : Activation::swiglu;
}

// For shapes and addresses that the kernel does not take.
at::Tensor by_operators(const at::Tensor& input, const FusedLinear& linear) {
  at::Tensor x = input;
  if (linear.norm_bias.defined()) {
    x = at::layer_norm(x, {x.size(-1)}, linear.norm_weight, linear.norm_bias, linear.epsilon);
  } else if (linear.norm_weight.defined()) {
    const at::Tensor wide = x.to(at::kFloat);
    const at::Tensor scale = at::rsqrt(wide.square().mean(-1, /*keepdim=*/true) + linear.epsilon);
    x = (wide * scale).to(x.scalar_type()) * linear.norm_weight;
  }
  x = at::linear(x, linear.weight, linear.bias);
  if (linear.activation == Fused::gelu) x = at::gelu(x, "tanh");
  if (linear.activation == Fused::swiglu) {
    const auto halves = x.chunk(2, -1);
    x = at::silu(halves[0]).mul_(halves[1]);
  }
  return linear.residual.defined() ? x + linear.residual : x;
}

// Which blocks share a row depends on all but the addresses.
DecodeAttention shape_of(const at::Tensor& qkv, const AttentionHeads& heads, const at::Tensor& keys,
                         int64_t window) {
  return {.rows = qkv.size(1),
          .heads = heads.heads,
          .kv_heads = heads.kv_heads,
          .width = keys.size(3),
          .capacity = keys.size(2),
          .window = window,
          .epsilon = static_cast<float>(heads.epsilon)};
}

at::Tensor attend_new_cuda(const at::Tensor& qkv, const at::Tensor& q_norm,
                           const at::Tensor& k_norm, const at::Tensor& rotation,
                           const at::Tensor& positions, const at::Tensor& slots, at::Tensor keys,
                           at::Tensor values, at::Tensor scratch, at::Tensor counters,
                           int64_t heads, double epsilon, int64_t window) {
  const c10::cuda::CUDAGuard guard(qkv.device());
  const at::Tensor in = qkv.contiguous();
  at::Tensor out = at::empty({1, in.size(1), heads * keys.size(3)}, in.options());
  DecodeAttention attention =
      shape_of(in, {.heads = heads, .kv_heads = keys.size(1), .epsilon = epsilon}, keys, window);
  attention.qkv = in.data_ptr();
  // The kernel reads packs: a parameter of a sharded model may lie between them.
  const auto packed = [&](const at::Tensor& norm) {
    const bool aligned = reinterpret_cast<uintptr_t>(norm.data_ptr()) % 32 == 0;
    const at::Tensor alike = norm.to(in.scalar_type());
    return aligned || !alike.is_same(norm) ? alike : norm.clone();
  };
  at::Tensor q_weight, k_weight;
  if (q_norm.numel() > 0) {
    q_weight = packed(q_norm);
    k_weight = packed(k_norm);
    attention.q_norm = q_weight.data_ptr();
    attention.k_norm = k_weight.data_ptr();
  }
  if (rotation.numel() > 0) {
    attention.table = rotation.data_ptr<float>();
    attention.table_positions = rotation.size(1);
  }
  attention.positions = positions.data_ptr<int64_t>();
  attention.slots = slots.data_ptr<int64_t>();
  attention.keys = keys.data_ptr();
  attention.values = values.data_ptr();
  attention.result = out.data_ptr();
  attention.scratch = scratch.data_ptr<float>();
  attention.counters = reinterpret_cast<unsigned*>(counters.data_ptr<int32_t>());
  launch_decode_attention(attention, memory::dtype_of(in, "attention"),
                          c10::cuda::getCurrentCUDAStream().stream());
  return out;
}

// An operator: norms may be parameters of a sharded model.
TORCH_LIBRARY_FRAGMENT(lockstep, library) {
  library.def(
      "attend_new(Tensor qkv, Tensor q_norm, Tensor k_norm, Tensor rotation, Tensor positions, "
      "Tensor slots, Tensor(a!) keys, Tensor(b!) values, Tensor(c!) scratch, Tensor(d!) counters, "
      "int heads, float epsilon, int window) -> Tensor");
  library.impl("attend_new", c10::DispatchKey::CUDA, TORCH_FN(attend_new_cuda));
}

}  // namespace

bool has_decode_kernels(const at::Tensor& tensor) {
  const auto type = tensor.scalar_type();
  return tensor.is_cuda() && (type == at::kFloat || type == at::kHalf || type == at::kBFloat16);
}

at::Tensor few_linear(const at::Tensor& input, const FusedLinear& linear) {
  const c10::cuda::CUDAGuard guard(input.device());
  const at::Tensor x = input.contiguous(), residual = linear.residual.defined()
                                                          ? linear.residual.contiguous()
                                                          : linear.residual;
  const bool gated = linear.activation == Fused::swiglu;
  const int64_t in = linear.weight.size(1), out = linear.weight.size(0) / (gated ? 2 : 1);
  auto sizes = input.sizes().vec();
  sizes.back() = out;
  FewLinear few{.vectors = x.numel() / in,
                .in = in,
                .out = out,
                .x = x.data_ptr(),
                .weight = linear.weight.data_ptr(),
                .bias = address(linear.bias),
                .norm_weight = address(linear.norm_weight),
                .norm_bias = address(linear.norm_bias),
                .residual = address(residual),
                .result = nullptr,
                .epsilon = static_cast<float>(linear.epsilon),
                .activation = activation_of(linear.activation)};
  const DType dtype = memory::dtype_of(x, "linear_of_few");
  const auto is_alike = [&](const at::Tensor& tensor) {
    return !tensor.defined() || (tensor.is_contiguous() && tensor.scalar_type() == x.scalar_type());
  };
  const bool alike = is_alike(linear.weight) && is_alike(linear.bias) &&
                     is_alike(linear.norm_weight) && is_alike(linear.norm_bias) &&
                     is_alike(residual);
  if (!alike || !can_launch(few, dtype)) return by_operators(input, linear);
  at::Tensor result = at::empty(sizes, input.options());
  few.result = result.data_ptr();
  launch_few_linear(few, dtype, c10::cuda::getCurrentCUDAStream().stream());
  return result;
}

bool can_attend(c10::Device device, int64_t heads, int64_t kv_heads, int64_t width) {
  return device.is_cuda() &&
         can_launch(DecodeAttention{
             .rows = 1, .heads = heads, .kv_heads = kv_heads, .width = width, .capacity = 1});
}

at::Tensor attend_new(const at::Tensor& qkv, const AttentionHeads& heads, const NewTokens& tokens,
                      AttentionMemory& memory, int64_t window) {
  if (!memory.scratch.defined()) {
    const auto shape = shape_of(qkv, heads, memory.keys, window);
    memory.scratch = at::empty({attention_scratch(shape)}, memory.keys.options().dtype(at::kFloat));
    memory.counters = at::zeros({shape.rows * shape.heads}, memory.keys.options().dtype(at::kInt));
  }
  static const auto attend =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("lockstep::attend_new", "")
          .typed<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                            const at::Tensor&, const at::Tensor&, const at::Tensor&, at::Tensor,
                            at::Tensor, at::Tensor, at::Tensor, int64_t, double, int64_t)>();
  const auto given = [&](const at::Tensor& tensor) {
    return tensor.defined() ? tensor : at::empty({0}, qkv.options());
  };
  return attend.call(qkv, given(heads.q_norm), given(heads.k_norm), given(heads.rotation),
                     tokens.positions, tokens.slots, memory.keys, memory.values, memory.scratch,
                     memory.counters, heads.heads, heads.epsilon, window);
}

}  // namespace lockstep::nn::cuda
