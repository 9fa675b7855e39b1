// SPDX-License-Identifier: Apache-2.0
#include "lockstep/codec/packed_state.h"

namespace lockstep::codec {

PackedLayout packed_layout(const PackedFormat& format, int64_t elements) {
  constexpr size_t kAlignment = 256;
  const auto aligned = [](size_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  };
  PackedLayout layout;
  layout.exp_avg_sq = aligned(encoded_size(format.exp_avg, elements));
  layout.remainder = layout.exp_avg_sq + aligned(encoded_size(format.exp_avg_sq, elements));
  layout.total = layout.remainder;
  if (format.param == DType::bfloat16)
    layout.total += aligned(static_cast<size_t>(elements) * sizeof(uint16_t));
  return layout;
}

}  // namespace lockstep::codec
