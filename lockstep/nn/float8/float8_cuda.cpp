// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/float8/float8_cuda.h"

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <optional>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/memory/tensor_bytes.h"
#include "lockstep/nn/autograd/product.h"
#include "lockstep/nn/float8/float8_kernels.h"
#include "lockstep/nn/float8/scaled_mm.h"
#include "lockstep/nn/kernels/product_cuda.h"

namespace lockstep::nn::cuda {
namespace {

void* stream_of_float8() { return c10::cuda::getCurrentCUDAStream().stream(); }

// Kernels read 16 bytes at a time.
at::Tensor dense(const at::Tensor& matrix) {
  at::Tensor values = matrix.detach().contiguous();
  if (reinterpret_cast<uintptr_t>(values.data_ptr()) % 16 != 0) values = values.clone();
  if (values.dim() != 2 || values.size(1) % kFloat8Multiple != 0) {
    throw ConfigError(format("[fp8] a matrix is ({}), must have a multiple of {} columns",
                             join(values.sizes()), kFloat8Multiple));
  }
  return values;
}

int64_t rounded_up(int64_t rows) {
  return (rows + kFloat8Multiple - 1) / kFloat8Multiple * kFloat8Multiple;
}

}  // namespace

std::string float8_missing(c10::Device device) {
  if (!LOCKSTEP_HAS_SCALED_MM)
    return "this Lockstep was built with libtorch " TORCH_VERSION ", and libtorch 2.5 is needed";
  const auto* properties = at::cuda::getDeviceProperties(device.index());
  if (properties->major > 8 || (properties->major == 8 && properties->minor >= 9)) return "";
  return format("{} has compute capability {}.{}, and 8.9 is needed", properties->name,
                properties->major, properties->minor);
}

at::Tensor float8_amax(const at::Tensor& matrix) {
  const c10::cuda::CUDAGuard guard(matrix.device());
  const at::Tensor values = matrix.detach().contiguous();
  at::Tensor amax = at::empty({1}, values.options().dtype(at::kFloat));
  launch_amax(values.numel(), memory::dtype_of(values, "fp8"), values.data_ptr(),
              amax.data_ptr<float>(), stream_of_float8());
  return amax;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> float8_cast(const at::Tensor& matrix,
                                                           const at::Tensor& amax, Float8 kind,
                                                           Float8Layout layout) {
  const c10::cuda::CUDAGuard guard(matrix.device());
  const at::Tensor values = dense(matrix);
  const int64_t rows = values.size(0), columns = values.size(1), padded = rounded_up(rows);
  const auto bytes = values.options().dtype(at::kByte);
  at::Tensor codes = at::empty({layout == Float8Layout::transposed ? 0 : rows, columns}, bytes);
  at::Tensor transposed = at::empty({columns, layout == Float8Layout::rows ? 0 : padded}, bytes);
  at::Tensor inverse = at::empty({1}, values.options().dtype(at::kFloat));
  const auto memory = [](const at::Tensor& tensor) {
    return tensor.numel() > 0 ? tensor.data_ptr<uint8_t>() : nullptr;
  };
  if (values.numel() == 0) return {codes, transposed, inverse.fill_(1)};
  launch_cast({.rows = rows,
               .columns = columns,
               .padded_rows = padded,
               .kind = kind,
               .largest = format_of(kind).largest,
               .amax = amax.data_ptr<float>(),
               .codes = memory(codes),
               .transposed = memory(transposed),
               .inverse = inverse.data_ptr<float>()},
              memory::dtype_of(values, "fp8"), values.data_ptr(), stream_of_float8());
  return {codes, transposed, inverse};
}

at::Tensor float8_transpose(const at::Tensor& codes) {
  const c10::cuda::CUDAGuard guard(codes.device());
  const at::Tensor rows = dense(codes);
  const int64_t padded = rounded_up(rows.size(0));
  at::Tensor out = at::empty({rows.size(1), padded}, rows.options());
  if (out.numel() == 0) return out;
  launch_transpose(rows.size(0), rows.size(1), padded, rows.data_ptr<uint8_t>(),
                   out.data_ptr<uint8_t>(), stream_of_float8());
  return out;
}

at::Tensor float8_product(const Float8Operand& a, const Float8Operand& b,
                          const Float8ProductOptions& options) {
#if LOCKSTEP_HAS_SCALED_MM
  const auto typed = [](const Float8Operand& operand) {
    return operand.codes.view(operand.kind == Float8::e4m3 ? at::kFloat8_e4m3fn : at::kFloat8_e5m2);
  };
  if (options.added.defined()) {
    return kept_product([&] {
      if (products_are_timed(a.codes.device())) {
        if (const auto out = timed_product(typed(a), typed(b).t(),
                                           {.type = options.type,
                                            .bias = options.bias,
                                            .added = options.added,
                                            .into = options.in_place ? options.added : at::Tensor(),
                                            .a_scale = a.inverse,
                                            .b_scale = b.inverse,
                                            .fast = options.fast}))
          return *out;
      }
      Float8ProductOptions rest = options;
      rest.added = at::Tensor();
      rest.in_place = false;
      const at::Tensor out = cuda::float8_product(a, b, rest);
      return options.in_place ? at::Tensor(options.added).add_(out) : out.add_(options.added);
    });
  }
  // Only 16-bit results take the bias along.
  const bool adds = options.bias.defined() && options.type == options.bias.scalar_type() &&
                    options.type != at::kFloat;
  const at::Tensor out = at::_scaled_mm(typed(a), typed(b).t(), a.inverse, b.inverse,
                                        adds ? std::optional(options.bias) : std::nullopt,
                                        std::nullopt, options.type, options.fast);
  return options.bias.defined() && !adds ? (out + options.bias).to(options.type) : out;
#else
  static_cast<void>(a), static_cast<void>(b), static_cast<void>(options);
  throw Error("[fp8] " + float8_missing(a.codes.device()));
#endif
}

}  // namespace lockstep::nn::cuda
