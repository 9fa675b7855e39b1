// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/float8/float8.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <bit>
#include <mutex>
#include <tuple>

#include "lockstep/memory/threads/parallel_for.h"
#include "lockstep/nn/float8/float8_cuda.h"

namespace lockstep::nn {
namespace {

constexpr int64_t kCodesPerThread = 1 << 14;

using CastResult = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// The bits of magnitudes have their order, and those of NaN are above all.
at::Tensor amax_on_cpu(const at::Tensor& matrix) {
  const at::Tensor values = matrix.detach().to(at::kFloat).contiguous();
  const auto* data = reinterpret_cast<const uint32_t*>(values.data_ptr<float>());
  uint32_t largest = 0;
  std::mutex mutex;
  memory::parallel_for(values.numel(), kCodesPerThread, [&](int64_t begin, int64_t end) {
    uint32_t most = 0;
    for (int64_t i = begin; i < end; ++i) most = std::max(most, data[i] & 0x7FFFFFFFU);
    const std::lock_guard lock(mutex);
    largest = std::max(largest, most);
  });
  return at::full({1}, std::bit_cast<float>(largest), at::kFloat);
}

int64_t padded(int64_t rows) {
  return (rows + kFloat8Multiple - 1) / kFloat8Multiple * kFloat8Multiple;
}

at::Tensor transpose_on_cpu(const at::Tensor& codes) {
  const at::Tensor out = at::zeros({codes.size(1), padded(codes.size(0))}, codes.options());
  out.narrow(1, 0, codes.size(0)).copy_(codes.t());
  return out;
}

CastResult cast_on_cpu(const at::Tensor& matrix, const at::Tensor& amax_bits, int64_t kind,
                       int64_t layout) {
  const auto format = static_cast<Float8>(kind);
  const at::Tensor values = matrix.detach().to(at::kFloat).contiguous();
  at::Tensor codes = at::empty(values.sizes(), at::kByte);
  const float scale = float8_scale(amax_bits.view(at::kFloat).data_ptr<float>()[0], format);
  const float* from = values.data_ptr<float>();
  auto* to = codes.data_ptr<uint8_t>();
  memory::parallel_for(values.numel(), kCodesPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) to[i] = encode_float8(from[i] * scale, format);
  });
  const at::Tensor none = at::empty({0}, at::kByte);
  const auto wanted = static_cast<Float8Layout>(layout);
  return {wanted == Float8Layout::transposed ? none : codes,
          wanted == Float8Layout::rows ? none : transpose_on_cpu(codes),
          at::full({1}, 1.0F / scale, at::kFloat)};
}

CastResult cast_on_cuda(const at::Tensor& matrix, const at::Tensor& amax_bits, int64_t kind,
                        int64_t layout) {
  return cuda::float8_cast(matrix, amax_bits.view(at::kFloat), static_cast<Float8>(kind),
                           static_cast<Float8Layout>(layout));
}

at::Tensor decoded(const Float8Operand& operand) {
  static const auto table = [] {
    std::array<std::array<float, 256>, 2> values{};
    for (size_t code = 0; code < 256; ++code) {
      for (const Float8 kind : {Float8::e4m3, Float8::e5m2})
        values[static_cast<size_t>(kind)][code] = decode_float8(static_cast<uint8_t>(code), kind);
    }
    return values;
  }();
  at::Tensor values = at::empty(operand.codes.sizes(), at::kFloat);
  const auto& decode = table[static_cast<size_t>(operand.kind)];
  const auto* from = operand.codes.data_ptr<uint8_t>();
  float* to = values.data_ptr<float>();
  memory::parallel_for(values.numel(), kCodesPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) to[i] = decode[from[i]];
  });
  return values;
}

// Operators: the parameters of a sharded or offloaded model are gathered for operators. A model
// with mixed precision casts their floating-point arguments, so the scale comes as bits.
TORCH_LIBRARY_FRAGMENT(lockstep, library) {
  library.def("float8_amax(Tensor matrix) -> Tensor");
  library.impl("float8_amax", c10::DispatchKey::CPU, TORCH_FN(amax_on_cpu));
  library.impl("float8_amax", c10::DispatchKey::CUDA, TORCH_FN(cuda::float8_amax));
  library.def(
      "float8_cast(Tensor matrix, Tensor amax_bits, int kind, int layout) -> (Tensor, Tensor, "
      "Tensor)");
  library.impl("float8_cast", c10::DispatchKey::CPU, TORCH_FN(cast_on_cpu));
  library.impl("float8_cast", c10::DispatchKey::CUDA, TORCH_FN(cast_on_cuda));
}

}  // namespace

std::string float8_missing(c10::Device device) {
  return device.is_cuda() ? cuda::float8_missing(device) : "";
}

at::Tensor float8_amax(const at::Tensor& matrix) {
  static const auto amax = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("lockstep::float8_amax", "")
                               .typed<at::Tensor(const at::Tensor&)>();
  return amax.call(matrix);
}

Float8Matrix float8_cast(const at::Tensor& matrix, const at::Tensor& amax, Float8 kind,
                         Float8Layout layout) {
  static const auto cast =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("lockstep::float8_cast", "")
          .typed<CastResult(const at::Tensor&, const at::Tensor&, int64_t, int64_t)>();
  auto [codes, transposed, inverse] = cast.call(
      matrix, amax.view(at::kInt), static_cast<int64_t>(kind), static_cast<int64_t>(layout));
  return {.codes = std::move(codes),
          .transposed = std::move(transposed),
          .inverse = std::move(inverse),
          .kind = kind};
}

at::Tensor float8_transpose(const at::Tensor& codes) {
  return codes.is_cuda() ? cuda::float8_transpose(codes) : transpose_on_cpu(codes);
}

at::Tensor float8_product(const Float8Operand& a, const Float8Operand& b,
                          const Float8ProductOptions& options) {
  if (a.codes.is_cuda()) return cuda::float8_product(a, b, options);
  // Nothing comes between the product and its scale: recomputation keeps the result of both.
  const at::Tensor scale = a.inverse * b.inverse;
  const at::Tensor out = at::mm(decoded(a), decoded(b).t()).mul_(scale);
  at::Tensor sum = options.bias.defined() ? out + options.bias : out;
  if (options.in_place) return at::Tensor(options.added).add_(sum);
  if (options.added.defined()) sum = sum + options.added;
  return sum.to(options.type);
}

}  // namespace lockstep::nn
