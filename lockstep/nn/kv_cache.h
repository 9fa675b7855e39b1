// SPDX-License-Identifier: Apache-2.0
// The keys and values of texts that are being generated, so that a new token costs one token's
// work. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "lockstep/nn/kernels/decode_cuda.h"

namespace lockstep::nn {

// Tokens of one text that are computed together: `count` of them, after `begin` others.
struct TextSpan {
  int64_t row = 0;  // of the cache
  int64_t begin = 0, count = 1;

  int64_t end() const { return begin + count; }
};

struct KvCacheOptions {
  int64_t rows = 1;      // texts at a time
  int64_t capacity = 1;  // tokens of a text
  int64_t longest = 1;   // of a span
  int64_t window = 0;    // tokens that one sees, with itself; 0: all

  // Of a row: for what a span sees, and to continue for a while before tokens are moved.
  int64_t slots() const;
};

// A span and where its tokens are stored, which is the same in all caches of a model.
struct PlacedSpan : TextSpan {
  int64_t first = 0;    // the position of the token in slot 0
  int64_t dropped = 0;  // slots that are dropped before: what is behind them moves to the front

  int64_t slot() const { return begin - first; }  // of the first token
};

// What the rows of the caches have.
class KvPlaces {
 public:
  explicit KvPlaces(KvCacheOptions options);
  // Of the next tokens. A text begins with a span that begins at 0; its next span begins where the
  // last one ended.
  std::vector<PlacedSpan> place(std::span<const TextSpan> spans);

 private:
  KvCacheOptions options_;
  std::vector<int64_t> first_;  // of each row: the position of the token in slot 0
  std::vector<int64_t> end_;    // tokens that the row has had
};

// Of one attention. Memory for all rows is taken at once, with the first tokens. No gradients are
// recorded.
class KvCache {
 public:
  explicit KvCache(KvCacheOptions options) : options_(options) {}

  // q is (1, H, N, D), k and v are (1, K, N, D), of the tokens of all spans, one after the other.
  // Keeps k and v, and returns the attention of each token to its text up to itself: (1, H, N, D).
  at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    std::span<const PlacedSpan> spans);

  // The same on a CUDA device for one token of each row, whose places are in its memory, so that
  // the kernel can be recorded: (1, rows, (H + 2 K) D) -> (1, rows, H * D). Before it, drop() is
  // called where spans drop slots.
  at::Tensor attend_new(const at::Tensor& qkv, const cuda::AttentionHeads& heads,
                        const cuda::NewTokens& tokens);
  void drop(std::span<const PlacedSpan> spans);

 private:
  void allocate(int64_t heads, int64_t width, const at::TensorOptions& options);
  void store(const at::Tensor& k, const at::Tensor& v, std::span<const PlacedSpan> spans);

  KvCacheOptions options_;
  cuda::AttentionMemory memory_;
};

}  // namespace lockstep::nn
