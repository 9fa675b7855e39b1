// SPDX-License-Identifier: Apache-2.0
// Context parallelism: ranks that share the tokens of each row. Private: not installed.
//
// A row of T tokens is cut into 2 n chunks. Rank r has chunks r and 2 n - 1 - r (zig-zag): with
// causal attention, the work of one is what the work of the other leaves to the mean.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <vector>

#include "lockstep/comm/group.h"

namespace lockstep::nn {

// Ranks that share the tokens of each row, and how they attend: each with the keys and values of
// all, gathered, or with those of one rank at a time, in a ring.
struct ContextRanks {
  comm::Group group = {};
  bool ring = false;
};

// The chunks, of twice as many as there are ranks, that a rank has, in rising order.
using ChunksOf = std::array<int64_t, 2> (*)(int ranks, int rank);
std::array<int64_t, 2> zig_zag_chunks(int ranks, int rank);

// Which tokens of a row of `length` a rank has, in the order in which it has them. ConfigError
// unless the length is a multiple of 2 x ranks.
std::vector<int64_t> context_places(int64_t length, int ranks, int rank);

// Of keys or values (1, K, B * T / n, D) of this rank's tokens of B rows, those of all tokens, in
// order: (1, K, B * T, D). Backward sums the gradients of all ranks in float32, of which each gets
// those of its tokens. Collective, both ways.
at::Tensor gather_context(const at::Tensor& local, int64_t rows, const comm::Group& group);

}  // namespace lockstep::nn
