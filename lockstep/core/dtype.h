// SPDX-License-Identifier: Apache-2.0
// Element types that travel between ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace lockstep {

enum class DType : uint8_t {
  float64,
  float32,
  float16,
  bfloat16,
  int64,
  int32,
  int8,
  uint8,
  boolean
};

constexpr size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::float64:
    case DType::int64:
      return 8;
    case DType::float32:
    case DType::int32:
      return 4;
    case DType::float16:
    case DType::bfloat16:
      return 2;
    default:
      return 1;
  }
}

constexpr bool is_floating(DType dtype) { return dtype <= DType::bfloat16; }

constexpr std::string_view name_of(DType dtype) {
  constexpr std::string_view names[] = {"float64", "float32", "float16", "bfloat16", "int64",
                                        "int32",   "int8",    "uint8",   "bool"};
  return names[static_cast<size_t>(dtype)];
}

}  // namespace lockstep
