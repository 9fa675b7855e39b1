// SPDX-License-Identifier: Apache-2.0
// Attention of each position to itself and those before it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace lockstep::nn {

// softmax(q k^T / sqrt(D)) v, where position t sees positions 0 to t. q is (B, H, T, D), k and v
// (B, K, T, D) with K dividing H: H / K heads of q share one of k. Gives (B, H, T, D). With a
// `window` above 0 position t sees at most that many: t - window + 1 to t. libtorch's fused one
// where there is one (2.x) and no window smaller than T; else block by block, and backward computes
// the scores again, so that they are never all in memory. Differentiable once.
at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            int64_t window = 0);

// Queries [begin, begin + count) of q are the positions from `position` on.
struct QueryRun {
  int64_t begin = 0, position = 0, count = 0;
};

struct QueryPlaces {
  // (T) int64 on the CPU, that never fall and are at most t: position t sees none before starts[t].
  at::Tensor starts = {};
  std::vector<QueryRun> runs = {};  // that are all of q; empty: q has every position
};

inline constexpr int64_t kAttentionBlock = 128;
// The second of the two, on any libtorch. `block` positions of q at a time. With places.runs, q is
// (B, H, Q, D), of Q of the T positions of k and v.
at::Tensor blockwise_causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                      int64_t block = kAttentionBlock, int64_t window = 0,
                                      const QueryPlaces& places = {});

}  // namespace lockstep::nn
