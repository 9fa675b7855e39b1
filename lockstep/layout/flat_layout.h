// SPDX-License-Identifier: Apache-2.0
// Several tensors end to end in one line of memory that is cut into parts.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lockstep/layout/shard_math.h"

namespace lockstep::layout {

// Bytes at which a tensor in a line of parameters begins: as torch would begin one of its own.
inline constexpr int64_t kFlatAlignment = 64;
// The same in a bucket of gradients: a cache line, and what CUDA kernels like to load.
inline constexpr int64_t kBucketAlignment = 256;

// In elements. Padding lies between tensors, so that each begins at a multiple of the alignment; a
// part owns the padding that follows what it has. Blocks of parts without rows are empty.
struct FlatLayout {
  std::vector<int64_t> offsets;             // of each tensor in the line
  std::vector<Range> blocks;                // of each part in the line, which they tile
  std::vector<std::vector<RowShard>> rows;  // of each part: which rows of which tensors
  int64_t size = 0;

  std::vector<int64_t> counts() const;  // sizes of the blocks
};

// Parts are cut by cut_rows.
FlatLayout lay_out(std::span<const Shape> shapes, int64_t parts, int64_t alignment);

}  // namespace lockstep::layout
