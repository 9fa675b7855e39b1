// SPDX-License-Identifier: Apache-2.0
// The texts that a model generates, as its layers on one rank see them. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "lockstep/nn/kv_cache.h"

namespace lockstep::model {

struct DecodingOptions {
  nn::KvCacheOptions cache = {};
  // Single tokens are computed by cuda::attend_new().
  bool has_kernel = false;
};

// Shared by the layers, as nn::RandomContext is. All ranks of a pipeline call begin() with the same
// spans.
class Decoding {
 public:
  // Forgets all texts. Memory is taken with their first tokens. Returns the number of the reset:
  // texts are those of the last one.
  int64_t reset(DecodingOptions options);
  int64_t resets() const { return resets_; }
  // The tokens of the next forward. `device` is that of the model.
  void begin(std::span<const nn::TextSpan> spans, c10::Device device);
  // From now on layers compute as in training, without a cache.
  void end() { spans_.clear(); }
  bool is_active() const { return !spans_.empty(); }

  // What the layers are given for the spans, in the CPU's memory: (1, N), span by span; of single
  // tokens for which there is a kernel, (1, rows of the cache), so that every forward is alike.
  at::Tensor arranged(std::span<const nn::TextSpan> spans,
                      const std::vector<int64_t>& tokens) const;
  // Of the results of all rows, those of the spans, in their order.
  at::Tensor of_spans(const at::Tensor& results) const;

  // ---- for the layers ----
  const at::Tensor& positions() const { return positions_; }  // (N), within their texts
  const at::Tensor& wanted() const { return wanted_; }        // (M): the last token of each span
  // All tokens are single ones, one for each row, and all are wanted.
  bool are_new() const { return are_new_; }
  at::Tensor attend(int64_t layer, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);
  at::Tensor attend_new(int64_t layer, const at::Tensor& qkv,
                        const nn::cuda::AttentionHeads& heads);

 private:
  bool are_new(std::span<const nn::TextSpan> spans) const;
  void begin_new(c10::Device device);

  int64_t resets_ = 0;
  DecodingOptions options_;
  nn::KvPlaces places_{{}};
  std::vector<nn::PlacedSpan> spans_;
  bool are_new_ = false;
  at::Tensor positions_, wanted_;
  at::Tensor new_tokens_;                  // (2, rows): positions and slots, always the same memory
  std::map<int64_t, nn::KvCache> caches_;  // by layer
};

}  // namespace lockstep::model
