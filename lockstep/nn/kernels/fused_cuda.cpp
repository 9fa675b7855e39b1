// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/kernels/fused_cuda.h"

#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <limits>

#include "lockstep/memory/tensor_bytes.h"
#include "lockstep/nn/kernels/amax_note.h"
#include "lockstep/nn/kernels/embedding_kernel.h"
#include "lockstep/nn/kernels/fused_kernels.h"
#include "lockstep/nn/kernels/norm_kernels.h"

namespace lockstep::nn::cuda {
namespace {

void* current_stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

// Where casts to 8 bits want the largest magnitude of what is written: zero so far.
at::Tensor amax_cell(const at::Tensor& like) {
  return notes_amax() ? at::zeros({1}, like.options().dtype(at::kFloat)) : at::Tensor();
}
float* cell_of(const at::Tensor& amax) { return amax.defined() ? amax.data_ptr<float>() : nullptr; }
at::Tensor noted(at::Tensor out, const at::Tensor& amax) {
  if (amax.defined()) note_amax(out, amax);
  return out;
}

// As kernels read it that load 16 bytes at once.
bool is_packed(const at::Tensor& tensor) {
  return tensor.is_contiguous() && reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0;
}
at::Tensor packed(const at::Tensor& tensor) {
  return !tensor.defined() || is_packed(tensor) ? tensor
                                                : tensor.clone(at::MemoryFormat::Contiguous);
}

NormShape norm_shape(const at::Tensor& x, double epsilon) {
  int processors = 1;
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, x.get_device());
  return {x.numel() / x.size(-1), x.size(-1), static_cast<float>(epsilon), processors};
}

// Of (B, n, T, D).
HeadStrides strides_of(const at::Tensor& heads) {
  return {heads.stride(0), heads.stride(2), heads.stride(1)};
}

}  // namespace

// Ampere and later.
bool has_flash_attention(const at::Tensor& heads) {
  const auto type = heads.scalar_type();
  if (!heads.is_cuda() || (type != at::kHalf && type != at::kBFloat16)) return false;
  int major = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, heads.get_device());
  return major >= 8 && heads.size(3) % 8 == 0 && heads.size(3) <= 256;
}

bool has_fused_kernels(const at::Tensor& tensor) {
  const auto type = tensor.scalar_type();
  return tensor.is_cuda() && (type == at::kFloat || type == at::kHalf || type == at::kBFloat16);
}

void rotate_heads(const at::Tensor& qkv, const at::Tensor& rotation, int64_t rotated,
                  const at::Tensor& out) {
  const c10::cuda::CUDAGuard guard(qkv.device());
  const int64_t width = 2 * rotation.size(2), row = qkv.size(2);
  if (out.numel() == 0) return;
  const HeadStrides strides{qkv.size(1) * row, row, width};
  const auto* const memory = static_cast<const char*>(qkv.data_ptr());
  const HeadPart turned{memory, strides, rotated, true};
  const HeadPart others{memory + rotated * width * qkv.element_size(), strides,
                        out.is_same(qkv) ? 0 : row / width - rotated, false};
  launch_turn({.shape = {qkv.size(0), qkv.size(1), width},
               .parts = {turned, others, {}},
               .to = strides,
               .table = rotation.data_ptr<float>(),
               .table_positions = rotation.size(1),
               .sign = 1},
              memory::dtype_of(qkv, "split_heads"), out.data_ptr(), current_stream());
}

at::Tensor merge_heads(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const at::Tensor& rotation) {
  const c10::cuda::CUDAGuard guard(q.device());
  const int64_t batch = q.size(0), length = q.size(2), width = q.size(3);
  const int64_t heads = q.size(1) + k.size(1) + v.size(1), row = heads * width;
  at::Tensor out = at::empty({batch, length, row}, q.options());
  if (out.numel() == 0) return out;
  const at::Tensor amax = amax_cell(out);
  // Only the last dimension must be dense.
  const auto dense = [](const at::Tensor& part) {
    return part.stride(3) == 1 ? part : part.contiguous();
  };
  const auto part_of = [](const at::Tensor& part, bool turned) {
    return HeadPart{part.data_ptr(), strides_of(part), part.size(1), turned};
  };
  const at::Tensor from_q = dense(q), from_k = dense(k), from_v = dense(v);
  launch_turn({.shape = {batch, length, width},
               .parts = {part_of(from_q, true), part_of(from_k, true), part_of(from_v, false)},
               .to = {length * row, row, width},
               .table = rotation.data_ptr<float>(),
               .table_positions = rotation.size(1),
               .sign = -1,
               .amax = cell_of(amax)},
              memory::dtype_of(q, "split_heads"), out.data_ptr(), current_stream());
  return noted(out, amax);
}

bool has_rms_norm(const at::Tensor& x, const at::Tensor& weight) {
  return has_fused_kernels(x) && weight.device() == x.device() &&
         weight.scalar_type() == x.scalar_type() && weight.numel() == x.size(-1) &&
         !weight.key_set().has(c10::DispatchKey::DeferredInit) &&
         can_norm(x.size(-1), memory::dtype_of(x, "rms_norm")) && is_packed(x) && is_packed(weight);
}

RmsNormResult rms_norm(const at::Tensor& x, const at::Tensor& weight, double epsilon) {
  const c10::cuda::CUDAGuard guard(x.device());
  RmsNormResult result{at::empty_like(x),
                       at::empty({x.numel() / x.size(-1)}, x.options().dtype(at::kFloat))};
  if (x.numel() == 0) return result;
  const at::Tensor amax = amax_cell(result.out);
  launch_rms_norm(norm_shape(x, epsilon), memory::dtype_of(x, "rms_norm"), x.data_ptr(),
                  weight.data_ptr(), result.out.data_ptr(), result.scales.data_ptr<float>(),
                  cell_of(amax), current_stream());
  result.out = noted(result.out, amax);
  return result;
}

RmsNormGradients rms_norm_backward(const at::Tensor& x, const at::Tensor& weight,
                                   const at::Tensor& scales, const at::Tensor& grad,
                                   const at::Tensor& around, bool wants_x, bool wants_weight) {
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor out_grad = packed(grad), around_grad = packed(around);
  RmsNormGradients result;
  if (wants_x) result.x = at::empty_like(x);
  if (wants_weight) result.weight = at::empty_like(weight);
  if (x.numel() == 0) {
    if (wants_weight) result.weight.zero_();
    return result;
  }
  const DType dtype = memory::dtype_of(x, "rms_norm");
  const NormShape shape = norm_shape(x, 0);
  const at::Tensor partial =
      wants_weight ? at::empty({norm_partial_rows(shape, dtype), shape.width}, scales.options())
                   : at::Tensor();
  const at::Tensor amax = wants_x ? amax_cell(x) : at::Tensor();
  const auto memory_of = [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.data_ptr() : nullptr;
  };
  launch_rms_norm_backward(shape, dtype,
                           {.x = x.data_ptr(),
                            .weight = weight.data_ptr(),
                            .scales = scales.data_ptr<float>(),
                            .out = out_grad.data_ptr(),
                            .around = memory_of(around_grad),
                            .to_x = memory_of(result.x),
                            .to_weight = memory_of(result.weight),
                            .partial = cell_of(partial),
                            .amax = cell_of(amax)},
                           current_stream());
  if (wants_x) result.x = noted(result.x, amax);
  return result;
}

at::Tensor swiglu(const at::Tensor& gate_up) {
  const c10::cuda::CUDAGuard guard(gate_up.device());
  const int64_t width = gate_up.size(-1) / 2;
  auto sizes = gate_up.sizes().vec();
  sizes.back() = width;
  at::Tensor out = at::empty(sizes, gate_up.options());
  if (out.numel() == 0) return out;
  const at::Tensor amax = amax_cell(out);
  launch_swiglu(out.numel() / width, width, memory::dtype_of(gate_up, "swiglu"), gate_up.data_ptr(),
                out.data_ptr(), cell_of(amax), current_stream());
  return noted(out, amax);
}

at::Tensor swiglu_backward(const at::Tensor& gate_up, const at::Tensor& grad) {
  const c10::cuda::CUDAGuard guard(gate_up.device());
  const int64_t width = grad.size(-1);
  at::Tensor out = at::empty_like(gate_up);
  if (out.numel() == 0) return out;
  const at::Tensor amax = amax_cell(out);
  launch_swiglu_backward(grad.numel() / width, width, memory::dtype_of(gate_up, "swiglu"),
                         gate_up.data_ptr(), grad.data_ptr(), out.data_ptr(), cell_of(amax),
                         current_stream());
  return noted(out, amax);
}

bool has_embedding_gradient(const at::Tensor& table) {
  return has_fused_kernels(table) && table.dim() == 2 &&
         !table.key_set().has(c10::DispatchKey::DeferredInit) &&
         table.size(0) <= std::numeric_limits<int32_t>::max() &&
         can_sum_rows(table.size(1), memory::dtype_of(table, "embedding"));
}

at::Tensor embedding_gradient(const at::Tensor& gradient, const at::Tensor& indices, int64_t rows) {
  const c10::cuda::CUDAGuard guard(gradient.device());
  const int64_t width = gradient.size(-1), count = indices.numel();
  at::Tensor table = at::zeros({rows, width}, gradient.options());
  if (count == 0) return table;
  const at::Tensor from = packed(gradient);
  const auto [sorted, order] = indices.reshape({-1}).to(at::kInt).sort(/*stable=*/true, 0, false);
  const at::Tensor partial =
      at::empty({2 * row_sum_chunks(count), width}, from.options().dtype(at::kFloat));
  launch_sum_rows({.count = count,
                   .width = width,
                   .sorted = sorted.data_ptr<int32_t>(),
                   .order = order.data_ptr<int64_t>(),
                   .gradient = from.data_ptr(),
                   .table = table.data_ptr(),
                   .partial = partial.data_ptr<float>()},
                  memory::dtype_of(from, "embedding"), current_stream());
  return table;
}

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets, int64_t ignored,
                         double scale, const at::Tensor& gradient) {
  const c10::cuda::CUDAGuard guard(logits.device());
  at::Tensor losses = at::empty({logits.size(0)}, logits.options().dtype(at::kFloat));
  if (logits.numel() == 0) return losses.zero_();
  launch_cross_entropy({logits.size(0), logits.size(1), ignored},
                       memory::dtype_of(logits, "cross_entropy"), logits.data_ptr(),
                       targets.data_ptr<int64_t>(), static_cast<float>(scale), gradient.data_ptr(),
                       losses.data_ptr<float>(), current_stream());
  return losses;
}

void scale_unless_one(const at::Tensor& tensor, const at::Tensor& factor) {
  const c10::cuda::CUDAGuard guard(tensor.device());
  if (tensor.numel() == 0) return;
  launch_scale_unless_one(tensor.numel(), memory::dtype_of(tensor, "cross_entropy"),
                          tensor.data_ptr(), factor.data_ptr<float>(), current_stream());
}

}  // namespace lockstep::nn::cuda
