// SPDX-License-Identifier: Apache-2.0
#include "lockstep/layout/offload_ring.h"

#include <algorithm>

#include "lockstep/layout/offload_plan.h"

namespace lockstep::layout {
namespace {

constexpr size_t kAlignment = 256;

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

int64_t slice_elements(const OffloadOptions& options, bool cuda) {
  // A few of them together have at most an eighth of the device's limit.
  // Of an element of float32 or bfloat16, at most: state, parameter and gradient. Elements of
  // float64 have up to 32, and those of float16 18.
  constexpr int64_t kBytes = 16;
  const int64_t most = cuda ? int64_t{16} << 20 : int64_t{1} << 20;
  const int64_t fits =
      options.device_limit / 8 / kFewSlices / kBytes / codec::kBlock * codec::kBlock;
  return std::clamp(fits, codec::kBlock, most);
}

SlotLayout slot_layout(const codec::PackedFormat& format, int64_t elements,
                       const OffloadOptions& options) {
  const auto bytes = [&](bool moves, DType dtype) {
    return moves ? aligned(static_cast<size_t>(elements) * size_of(dtype)) : 0;
  };
  const size_t state = aligned(codec::packed_layout(format, elements).total);
  const size_t param = format.weight == codec::Codec::none
                           ? bytes(options.params, format.param)
                           : codec::coded_layout(format.weight, elements).total;
  const size_t grad = state + param;
  return {state, grad, grad + bytes(options.grads, updated_with(format.grad))};
}

RingNeed& RingNeed::operator+=(const RingNeed& other) {
  largest = std::max(largest, other.largest);
  all += other.all;
  return *this;
}

int64_t RingNeed::least() const { return std::min(kFewSlices * largest, all); }

RingNeed ring_need(const StatePlan& plan, const OffloadOptions& options) {
  RingNeed need;
  for (const StateSlice& slice : plan.slices) {
    const auto bytes = static_cast<int64_t>(slot_layout(plan.format, slice.count, options).total);
    need += {.largest = bytes, .all = bytes};
  }
  return need;
}

int64_t ring_bytes(const RingNeed& need, const OffloadOptions& options, bool streams,
                   int64_t room) {
  // What is fetched before gradients are known makes updates quick, but costs memory that could
  // hold state for good: the more of it leaves, the more is worth it, up to two fifths of the
  // limit.
  const auto limit = static_cast<double>(options.device_limit);
  const auto most = static_cast<int64_t>(0.4 * aggressiveness(options.advanced.strategy) * limit);
  const int64_t useful = streams ? std::max<int64_t>(std::min(most, room), 0) : 0;
  constexpr auto kUnit = static_cast<int64_t>(kAlignment);
  return std::max(std::min(useful, need.all) / kUnit * kUnit, need.least());
}

std::vector<OffloadFlat::Tensor> optimized_tensors(
    std::span<const Shape> shapes, const FlatLayout& layout, int part,
    const std::function<bool(size_t)>& is_embedding) {
  std::vector<OffloadFlat::Tensor> tensors;
  for (const RowShard& shard : layout.rows[static_cast<size_t>(part)]) {
    const auto index = static_cast<size_t>(shard.tensor);
    const Shape& shape = shapes[index];
    const int64_t row = !shape.empty() && shape[0] > 0 ? numel_of(shape) / shape[0] : 1;
    if (shard.rows.size() > 0) tensors.push_back({shard.rows.size() * row, is_embedding(index)});
  }
  return tensors;
}

}  // namespace lockstep::layout
