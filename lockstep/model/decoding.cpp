// SPDX-License-Identifier: Apache-2.0
#include "lockstep/model/decoding.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace lockstep::model {

int64_t Decoding::reset(DecodingOptions options) {
  options_ = options;
  places_ = nn::KvPlaces(options.cache);
  spans_.clear();
  caches_.clear();
  new_tokens_ = at::Tensor();
  return ++resets_;
}

bool Decoding::are_new(std::span<const nn::TextSpan> spans) const {
  return options_.has_kernel &&
         std::ranges::all_of(spans, [](const nn::TextSpan& span) { return span.count == 1; });
}

at::Tensor Decoding::arranged(std::span<const nn::TextSpan> spans,
                              const std::vector<int64_t>& tokens) const {
  if (!are_new(spans)) return at::tensor(tokens, at::kLong).unsqueeze(0);
  std::vector<int64_t> by_row(static_cast<size_t>(options_.cache.rows));
  for (size_t i = 0; i < spans.size(); ++i) by_row[static_cast<size_t>(spans[i].row)] = tokens[i];
  return at::tensor(by_row, at::kLong).unsqueeze(0);
}

at::Tensor Decoding::of_spans(const at::Tensor& results) const {
  if (!are_new_) return results;
  std::vector<int64_t> rows;
  for (const nn::PlacedSpan& span : spans_) rows.push_back(span.row);
  return results.index_select(0, at::tensor(rows, at::kLong).to(results.device()));
}

void Decoding::begin(std::span<const nn::TextSpan> spans, c10::Device device) {
  spans_ = places_.place(spans);
  are_new_ = are_new(spans);
  if (are_new_) return begin_new(device);
  std::vector<int64_t> positions, wanted;
  for (const nn::PlacedSpan& span : spans_) {
    for (int64_t i = span.begin; i < span.end(); ++i) positions.push_back(i);
    wanted.push_back(static_cast<int64_t>(positions.size()) - 1);
  }
  positions_ = at::tensor(positions, at::kLong).to(device);
  wanted_ = at::tensor(wanted, at::kLong).to(device);
}

void Decoding::begin_new(c10::Device device) {
  for (auto& [layer, cache] : caches_) cache.drop(spans_);
  const auto rows = static_cast<size_t>(options_.cache.rows);
  std::vector<int64_t> numbers(2 * rows);
  std::fill(numbers.begin() + options_.cache.rows, numbers.end(), -1);
  for (const nn::PlacedSpan& span : spans_) {
    numbers[static_cast<size_t>(span.row)] = span.begin;
    numbers[rows + static_cast<size_t>(span.row)] = span.slot();
  }
  const at::Tensor now = at::tensor(numbers, at::kLong).view({2, -1});
  if (new_tokens_.defined()) {
    new_tokens_.copy_(now.pin_memory(), /*non_blocking=*/true);
  } else {
    new_tokens_ = now.to(device);
  }
  positions_ = new_tokens_[0];
}

at::Tensor Decoding::attend(int64_t layer, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v) {
  return caches_.try_emplace(layer, options_.cache).first->second.attend(q, k, v, spans_);
}

at::Tensor Decoding::attend_new(int64_t layer, const at::Tensor& qkv,
                                const nn::cuda::AttentionHeads& heads) {
  return caches_.try_emplace(layer, options_.cache)
      .first->second.attend_new(qkv, heads, {new_tokens_[0], new_tokens_[1]});
}

}  // namespace lockstep::model
