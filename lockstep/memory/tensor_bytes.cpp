// SPDX-License-Identifier: Apache-2.0
#include "lockstep/memory/tensor_bytes.h"

#include <c10/core/ScalarType.h>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::memory {
namespace {

constexpr std::pair<at::ScalarType, DType> kTypes[] = {
    {at::kDouble, DType::float64},    {at::kFloat, DType::float32}, {at::kHalf, DType::float16},
    {at::kBFloat16, DType::bfloat16}, {at::kLong, DType::int64},    {at::kInt, DType::int32},
    {at::kChar, DType::int8},         {at::kByte, DType::uint8},    {at::kBool, DType::boolean}};

}  // namespace

DType dtype_of(const at::Tensor& tensor, std::string_view operation) {
  for (const auto& [scalar_type, dtype] : kTypes) {
    if (tensor.scalar_type() == scalar_type) return dtype;
  }
  throw ConfigError(format(
      "[{}] dtype {} is not supported; supported are float64, float32, float16, bfloat16, int64, "
      "int32, int8, "
      "uint8 and bool",
      operation, c10::toString(tensor.scalar_type())));
}

at::ScalarType to_scalar_type(DType dtype) {
  for (const auto& [scalar_type, known] : kTypes) {
    if (dtype == known) return scalar_type;
  }
  throw std::logic_error("lockstep bug: dtype without a scalar type");
}

std::span<std::byte> bytes_of(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()};
}

}  // namespace lockstep::memory
