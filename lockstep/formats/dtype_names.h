// SPDX-License-Identifier: Apache-2.0
// Element types as safetensors files name them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "lockstep/core/dtype.h"
#include "lockstep/layout/box.h"

namespace lockstep::formats {

// "F32", "BF16", ...
std::string safetensors_name(DType dtype);
// None where Lockstep has no such type ("F8_E4M3", "U64", ...) or the format has none ("F33").
std::optional<DType> dtype_of(std::string_view safetensors_name);

// Place in the list of all types, by which writers sort; none for a name that is not in it.
std::optional<int> type_order(std::string_view safetensors_name);

// Bytes of a tensor. None where the type is unknown, a size is negative, a number does not fit in
// 63 bits, or the elements (of 4 or 6 bits) do not fill a byte.
std::optional<int64_t> byte_size(std::string_view safetensors_name, const layout::Shape& shape);

}  // namespace lockstep::formats
