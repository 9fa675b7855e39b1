// SPDX-License-Identifier: Apache-2.0
// Floats as whole numbers of the same order, for engines whose min and max lose a NaN: MPI and Gloo
// compare with <, so what comes out depends on which side the NaN is. Private to comm.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/where.h>

#include <cstdint>
#include <limits>

namespace lockstep::comm::detail {

// The bits of positive floats are in their order, those of negative ones in the opposite order.
// Turns either into the other; `whole` is int32 or int64.
inline at::Tensor turn_negative(const at::Tensor& whole) {
  const int64_t all_but_sign = whole.scalar_type() == at::kInt
                                   ? std::numeric_limits<int32_t>::max()
                                   : std::numeric_limits<int64_t>::max();
  return at::where(whole.lt(0), whole.bitwise_xor(all_but_sign), whole);
}

// Of float32 or float64. A NaN becomes the largest number, or the smallest, which turn back into a
// NaN.
inline at::Tensor to_whole_order(const at::Tensor& floats, bool nan_is_largest) {
  const bool wide = floats.scalar_type() == at::kDouble;
  const at::Tensor whole = turn_negative(floats.view(wide ? at::kLong : at::kInt));
  using Int = std::numeric_limits<int32_t>;
  using Long = std::numeric_limits<int64_t>;
  const int64_t nan = nan_is_largest ? (wide ? Long::max() : int64_t{Int::max()})
                                     : (wide ? Long::min() : int64_t{Int::min()});
  return whole.masked_fill(floats.ne(floats), nan);
}

inline at::Tensor from_whole_order(const at::Tensor& whole) {
  return turn_negative(whole).view(whole.scalar_type() == at::kLong ? at::kDouble : at::kFloat);
}

}  // namespace lockstep::comm::detail
