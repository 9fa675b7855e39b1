// SPDX-License-Identifier: Apache-2.0
// Attention of some queries to some keys, with what is needed to put several such parts of one
// softmax together. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include "lockstep/nn/context/attention_tiles.h"

namespace lockstep::nn {

struct PartialAttention {
  at::Tensor out;  // (1, H, queries, D): softmax over the keys of the tile alone, times values
  at::Tensor lse;  // (1, H, queries): log of the sum of exp(score / sqrt(D)) over these keys
};

// q is (1, H, M, D) of all tokens of a rank, k and v (1, K, M, D) of those of another. In float32,
// or float64 where q has it. Not recorded by autograd.
PartialAttention attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        const AttentionTile& tile);

// Puts a part to the attention to other keys, in place. The lse of queries that have seen no key so
// far is minus infinity.
void merge(const at::Tensor& out, const at::Tensor& lse, const PartialAttention& part,
           const AttentionTile& tile);

// Of all tokens of a rank: what the softmax over all keys gave, and its gradient.
struct AttentionResult {
  at::Tensor out, lse;  // (1, H, M, D) in the type of q, and (1, H, M)
  at::Tensor grad;      // of `out`, in its type
  at::Tensor delta;     // (1, H, M): sum of grad * out over D
};
// Sums, in the type of lse, in the shapes of q, k and v.
struct AttentionGradients {
  at::Tensor q, k, v;
};
// Adds what the tile contributes.
void add_gradients(const AttentionGradients& sums, const at::Tensor& q, const at::Tensor& k,
                   const at::Tensor& v, const AttentionResult& result, const AttentionTile& tile);

}  // namespace lockstep::nn
