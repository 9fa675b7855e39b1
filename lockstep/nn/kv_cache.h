// SPDX-License-Identifier: Apache-2.0
// The keys and values of texts that are being generated, so that a new token costs one token's
// work. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

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
};

// Of one attention. Memory for all rows is taken at once, with the first tokens.
class KvCache {
 public:
  explicit KvCache(KvCacheOptions options) : options_(options) {}

  // q is (1, H, N, D), k and v are (1, K, N, D), of the tokens of all spans, one after the other.
  // Keeps k and v, and returns the attention of each token to its text up to itself, or to the last
  // `window` tokens where that is above 0: (1, H, N, D). A text begins with a span that begins at
  // 0; its next span begins where the last one ended. No gradients are recorded.
  at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    std::span<const TextSpan> spans, int64_t window = 0);

 private:
  void store(const at::Tensor& k, const at::Tensor& v, std::span<const TextSpan> spans,
             int64_t window);

  KvCacheOptions options_;
  at::Tensor keys_, values_;    // (rows, K, slots, D)
  std::vector<int64_t> first_;  // of each row: the position of the token in slot 0
  std::vector<int64_t> end_;    // tokens that the row has had
};

}  // namespace lockstep::nn
