// SPDX-License-Identifier: Apache-2.0
// Between torch's tensors and the byte spans that operations are made of.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <span>
#include <string_view>

#include "lockstep/core/dtype.h"

namespace lockstep::comm::detail {

// Throws ConfigError naming `operation` for a dtype that does not travel.
DType dtype_of(const at::Tensor& tensor, std::string_view operation);
at::ScalarType to_scalar_type(DType dtype);

// The bytes of a contiguous tensor.
std::span<std::byte> bytes_of(const at::Tensor& tensor);

}  // namespace lockstep::comm::detail
