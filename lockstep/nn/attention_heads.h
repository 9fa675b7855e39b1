// SPDX-License-Identifier: Apache-2.0
// From one projection to the heads of an attention, with rotary position embedding (RoPE).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <span>

namespace lockstep::nn {

struct Heads {
  at::Tensor q;     // (B, H, T, D)
  at::Tensor k, v;  // (B, K, T, D)
};

struct HeadOptions {
  int64_t heads = 1, kv_heads = 1;
  // From rotary_table(), for at least T positions; undefined: no rotation.
  at::Tensor rotation = {};
  // Applied to (B, T, n, D) of q and of k, before the rotation: norms of each head. Both or none.
  std::function<at::Tensor(const at::Tensor&)> q_norm = {}, k_norm = {};
  // The heads may be turned in the memory of qkv, whose values have no other use.
  bool overwrite = false;
};

// qkv is (B, T, (H + 2 K) * D): the heads of q, then of k, then of v. With a rotation, the two
// halves of each head of q and k turn as pairs (as Hugging Face's Llama has it, "rotate half").
Heads split_heads(const at::Tensor& qkv, const HeadOptions& options);

// (2, positions, D / 2) float32: cosines, then sines, of position * frequency.
at::Tensor rotary_table(std::span<const double> frequencies, int64_t positions);

}  // namespace lockstep::nn
