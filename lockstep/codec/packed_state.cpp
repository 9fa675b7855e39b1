// SPDX-License-Identifier: Apache-2.0
#include "lockstep/codec/packed_state.h"

#include "lockstep/codec/master.h"

namespace lockstep::codec {
namespace {

size_t aligned(size_t bytes) {
  constexpr size_t kAlignment = 256;
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

PackedLayout packed_layout(const PackedFormat& format, int64_t elements) {
  PackedLayout layout;
  layout.exp_avg_sq = aligned(encoded_size(format.exp_avg, elements));
  layout.remainder = layout.exp_avg_sq + aligned(encoded_size(format.exp_avg_sq, elements));
  layout.total = layout.remainder;
  if (format.param == DType::bfloat16)
    layout.total += aligned(static_cast<size_t>(elements) * sizeof(uint16_t));
  return layout;
}

CodedLayout coded_layout(Codec codec, int64_t elements) {
  CodedLayout layout;
  layout.scales = aligned(codes_size(codec, elements));
  layout.remainder = layout.scales + aligned(scales_size(codec, elements));
  layout.total = layout.remainder + aligned(static_cast<size_t>(elements));
  return layout;
}

}  // namespace lockstep::codec
