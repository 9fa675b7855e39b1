// SPDX-License-Identifier: Apache-2.0
// How the data of a collective is cut into one block for each rank. Private to comm.
#pragma once

#include <cstdint>
#include <vector>

#include "lockstep/core/dtype.h"

namespace lockstep::comm::detail {

// Consecutive blocks of these numbers of elements.
template <class Span>
std::vector<Span> cut(Span whole, const std::vector<int64_t>& counts, DType dtype) {
  std::vector<Span> blocks;
  size_t at = 0;
  for (const int64_t count : counts) {
    blocks.push_back(whole.subspan(at, static_cast<size_t>(count) * size_of(dtype)));
    at += blocks.back().size();
  }
  return blocks;
}

// `count` elements shared out among `size` ranks.
inline std::vector<int64_t> shares(int64_t count, size_t size) {
  const auto ranks = static_cast<int64_t>(size);
  std::vector<int64_t> counts(size, count / ranks);
  for (int64_t rank = 0; rank < count % ranks; ++rank) ++counts[static_cast<size_t>(rank)];
  return counts;
}

}  // namespace lockstep::comm::detail
