// SPDX-License-Identifier: Apache-2.0
// Several tensors end to end in one line of memory that is cut into parts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "lockstep/layout/parallel_config.h"
#include "lockstep/layout/shard_math.h"

namespace lockstep::layout {

// Bytes at which a tensor in a line of parameters begins: as torch would begin one of its own.
inline constexpr int64_t kFlatAlignment = 64;
// The same in a bucket of gradients: a cache line, and what CUDA kernels like to load.
inline constexpr int64_t kBucketAlignment = 256;

// In elements. Padding lies between tensors, so that each begins at a multiple of the alignment; a
// part owns the padding that follows what it has. Blocks of parts without rows are empty.
struct FlatLayout {
  std::vector<int64_t> offsets;             // of each tensor in the line, ascending
  std::vector<Range> blocks;                // of each part in the line, which they tile
  std::vector<std::vector<RowShard>> rows;  // of each part: which rows of which tensors
  int64_t size = 0;

  std::vector<int64_t> counts() const;  // sizes of the blocks
};

// Parts are cut by cut_rows.
FlatLayout lay_out(std::span<const Shape> shapes, int64_t parts, int64_t alignment);
// Tensor i belongs wholly to part owners[i]. Owners must ascend, so that each part is one block. No
// owners: the same as above.
FlatLayout lay_out(std::span<const Shape> shapes, std::span<const int> owners, int64_t parts,
                   int64_t alignment);
// In which order `count` tensors lie in a line: by owner, and those of one owner as they are. No
// owners: as they are.
std::vector<size_t> order_of_tensors(size_t count, std::span<const int> owners);

// A tensor that ranks share by ShardGranularity::tensors.
struct DealtTensor {
  int64_t elements = 0;
  bool trained = true;
  // One of the first `reserved` indices. None: the next index after those.
  std::optional<int64_t> index = std::nullopt;
};
struct Deal {
  int world = 1;                               // ranks that share the tensors
  int64_t min_elements = kMinShardedElements;  // smaller tensors stay whole on every rank
  int64_t reserved = 0;  // indices that only tensors with a given index have: tied parameters are
                         // in several stages, and must have the same owner in all of them
};
inline constexpr int kEveryRank = -1;
// The rank that owns each tensor of a model, given in the model's order; kEveryRank for one that
// stays whole. Frozen tensors are counted by themselves, so that trained ones stay balanced.
std::vector<int> owners_of_tensors(std::span<const DealtTensor> tensors, const Deal& deal);

}  // namespace lockstep::layout
