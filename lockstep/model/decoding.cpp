// SPDX-License-Identifier: Apache-2.0
#include "lockstep/model/decoding.h"

#include <ATen/ATen.h>

#include <utility>

namespace lockstep::model {

void Decoding::reset(nn::KvCacheOptions options) {
  options_ = options;
  spans_.clear();
  caches_.clear();
}

void Decoding::begin(std::vector<nn::TextSpan> spans, c10::Device device) {
  spans_ = std::move(spans);
  std::vector<int64_t> positions, wanted;
  for (const nn::TextSpan& span : spans_) {
    for (int64_t i = span.begin; i < span.end(); ++i) positions.push_back(i);
    wanted.push_back(static_cast<int64_t>(positions.size()) - 1);
  }
  positions_ = at::tensor(positions, at::kLong).to(device);
  wanted_ = at::tensor(wanted, at::kLong).to(device);
}

at::Tensor Decoding::attend(int64_t layer, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, int64_t window) {
  return caches_.try_emplace(layer, options_).first->second.attend(q, k, v, spans_, window);
}

}  // namespace lockstep::model
