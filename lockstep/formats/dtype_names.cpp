// SPDX-License-Identifier: Apache-2.0
#include "lockstep/formats/dtype_names.h"

#include <algorithm>
#include <array>

namespace lockstep::formats {
namespace {

struct Type {
  std::string_view name;
  int bits;
  std::optional<DType> dtype = {};
};

// The reference implementation's order. Its writer sorts by it, the last first, so that wide types
// come first and every tensor is aligned.
constexpr std::array kTypes = {Type{"BOOL", 8, DType::boolean},
                               Type{"F4", 4},
                               Type{"F6_E2M3", 6},
                               Type{"F6_E3M2", 6},
                               Type{"U8", 8, DType::uint8},
                               Type{"I8", 8, DType::int8},
                               Type{"F8_E5M2", 8},
                               Type{"F8_E4M3", 8},
                               Type{"F8_E8M0", 8},
                               Type{"F8_E4M3FNUZ", 8},
                               Type{"F8_E5M2FNUZ", 8},
                               Type{"I16", 16},
                               Type{"U16", 16},
                               Type{"F16", 16, DType::float16},
                               Type{"BF16", 16, DType::bfloat16},
                               Type{"I32", 32, DType::int32},
                               Type{"U32", 32},
                               Type{"F32", 32, DType::float32},
                               Type{"C64", 64},
                               Type{"F64", 64, DType::float64},
                               Type{"I64", 64, DType::int64},
                               Type{"U64", 64}};

const Type* find(std::string_view name) {
  const auto* found = std::find_if(kTypes.begin(), kTypes.end(),
                                   [&](const Type& type) { return type.name == name; });
  return found == kTypes.end() ? nullptr : found;
}

}  // namespace

std::string safetensors_name(DType dtype) {
  const auto* found = std::find_if(kTypes.begin(), kTypes.end(),
                                   [&](const Type& type) { return type.dtype == dtype; });
  return std::string(found->name);
}

std::optional<DType> dtype_of(std::string_view safetensors_name) {
  const auto* const type = find(safetensors_name);
  return type == nullptr ? std::nullopt : type->dtype;
}

std::optional<int> type_order(std::string_view safetensors_name) {
  const auto* const type = find(safetensors_name);
  if (type == nullptr) return std::nullopt;
  return static_cast<int>(type - kTypes.begin());
}

std::optional<int64_t> byte_size(std::string_view safetensors_name, const layout::Shape& shape) {
  const auto* const type = find(safetensors_name);
  if (type == nullptr) return std::nullopt;
  // The order of the factors must not matter: (2^40, 2^40, 0) is refused like (0, 2^40, 2^40).
  int64_t bits = type->bits;
  bool empty = false;
  for (const auto size : shape) {
    if (size < 0) return std::nullopt;
    empty = empty || size == 0;
    if (size != 0 && __builtin_mul_overflow(bits, size, &bits)) return std::nullopt;
  }
  if (empty) return 0;
  if (bits % 8 != 0) return std::nullopt;
  return bits / 8;
}

}  // namespace lockstep::formats
