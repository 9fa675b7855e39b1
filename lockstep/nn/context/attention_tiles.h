// SPDX-License-Identifier: Apache-2.0
// What a context-parallel rank computes of the attention in a ring. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/layout/box.h"
#include "lockstep/nn/context/context.h"

namespace lockstep::nn {

// Queries of one rank and keys of one rank, of which each query sees a range that is not empty. The
// ranges' ends never fall from one query to the next.
struct AttentionTile {
  layout::Range queries, keys;  // places among the tokens of the ranks that have them
  // Queries and keys are the same tokens, and a query sees none behind itself. Otherwise every
  // query sees the last key.
  bool causal = false;
  // Where a query sees fewer: the tokens of the whole batch at which queries and keys begin, the
  // first token of each one's document, and the window; 0: none.
  int64_t query_position = 0, key_position = 0, window = 0;
  at::Tensor starts = {};
  // Of a causal tile on a device, (documents + 1) int32 that flash attention takes, if there are
  // several.
  at::Tensor borders = {};
  int64_t longest = 0;
  bool whole = false;  // chunks that no document and no window cuts: there are few shapes of these

  // The keys that a query of `queries` sees, from the first of `keys` on.
  layout::Range seen(int64_t query) const;
};

// In step i, rank r has the keys of rank r - i.
struct Ring {
  comm::Group group;
  std::vector<std::vector<AttentionTile>> steps;
};

// For rows of tokens that lie one after the other; `starts` has the first token of each one's
// document, (N) int64 on the CPU. A tile that would hold nothing is left out.
Ring plan_ring(const at::Tensor& starts, int64_t rows, int64_t window, const comm::Group& group,
               c10::Device device, ChunksOf chunks_of = zig_zag_chunks);

}  // namespace lockstep::nn
