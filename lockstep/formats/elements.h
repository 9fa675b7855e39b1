// SPDX-License-Identifier: Apache-2.0
// Elements of tensors as files hold them: decoded, converted from one floating type to another,
// transposed. Bytes need not be aligned for their type. Private: not installed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "lockstep/core/dtype.h"
#include "lockstep/layout/box.h"

namespace lockstep::formats {

// As numbers; `out` has one for each element. Whole numbers beyond 2^53 are rounded.
void decode(DType dtype, std::span<const std::byte> bytes, std::span<double> out);

// Elements of one floating type as another, rounded to nearest even; `to` holds as many. Returns
// how many finite ones became infinite.
int64_t convert(DType from_type, std::span<const std::byte> from, DType to_type,
                std::span<std::byte> to);

struct Matrix {
  std::span<const std::byte> bytes;  // row-major
  int64_t rows = 0, columns = 0;
  size_t width = 0;  // bytes of an element: 1, 2, 4 or 8
};

// Some columns of a matrix as the rows of another, which `out` holds.
void transpose(const Matrix& matrix, const layout::Range& columns, std::span<std::byte> out);

// All of it, in order: pieces of at most `max_numel` elements, but a row at least.
void transpose_in_pieces(const Matrix& matrix, int64_t max_numel,
                         const std::function<void(std::span<const std::byte>)>& function);

}  // namespace lockstep::formats
