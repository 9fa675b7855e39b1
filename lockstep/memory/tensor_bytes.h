// SPDX-License-Identifier: Apache-2.0
// Between torch's tensors and our dtypes and byte spans, which files and messages are made of.
// Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <span>
#include <string_view>

#include "lockstep/core/dtype.h"

namespace lockstep::memory {

// Throws ConfigError that names `operation` for a dtype that neither messages nor files can hold.
DType dtype_of(const at::Tensor& tensor, std::string_view operation);
// Every DType has one.
at::ScalarType to_scalar_type(DType dtype);

// The bytes of a contiguous tensor.
std::span<std::byte> bytes_of(const at::Tensor& tensor);

}  // namespace lockstep::memory
