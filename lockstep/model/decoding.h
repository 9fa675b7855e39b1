// SPDX-License-Identifier: Apache-2.0
// The texts that a model generates, as its layers on one rank see them. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <vector>

#include "lockstep/nn/kv_cache.h"

namespace lockstep::model {

// Shared by the layers, as nn::RandomContext is. All ranks of a pipeline call begin() with the same
// spans.
class Decoding {
 public:
  // Forgets all texts. Memory is taken with their first tokens.
  void reset(nn::KvCacheOptions options);
  // The tokens of the next forward: (1, N), span by span. `device` is that of the model.
  void begin(std::vector<nn::TextSpan> spans, c10::Device device);
  // From now on layers compute as in training, without a cache.
  void end() { spans_.clear(); }
  bool is_active() const { return !spans_.empty(); }

  // ---- for the layers ----
  const at::Tensor& positions() const { return positions_; }  // (N), within their texts
  const at::Tensor& wanted() const { return wanted_; }        // (M): the last token of each span
  at::Tensor attend(int64_t layer, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    int64_t window);

 private:
  nn::KvCacheOptions options_;
  std::vector<nn::TextSpan> spans_;
  at::Tensor positions_, wanted_;
  std::map<int64_t, nn::KvCache> caches_;  // by layer
};

}  // namespace lockstep::model
