// SPDX-License-Identifier: Apache-2.0
#include "lockstep/codec/packed_state.h"

#include "lockstep/codec/master.h"
#include "lockstep/core/error.h"

namespace lockstep::codec {
namespace {

size_t aligned(size_t bytes) {
  constexpr size_t kAlignment = 256;
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

size_t moment_size(const PackedFormat& format, Codec codec, int64_t elements) {
  if (codec == Codec::none) return static_cast<size_t>(elements) * size_of(moment_dtype(format));
  check(format.param != DType::float64, "codecs are for moments of float32");
  return encoded_size(codec, elements);
}

}  // namespace

Master master_of(const PackedFormat& format) {
  if (size_of(format.param) != 2) return Master::none;
  return format.param == DType::bfloat16 && format.moments == 2 ? Master::remainder : Master::whole;
}

PackedLayout packed_layout(const PackedFormat& format, int64_t elements) {
  PackedLayout layout;
  const auto moment = [&](int index, Codec codec) {
    return index < format.moments ? aligned(moment_size(format, codec, elements)) : 0;
  };
  layout.exp_avg_sq = moment(0, format.exp_avg);
  layout.remainder = layout.exp_avg_sq + moment(1, format.exp_avg_sq);
  const Master master = master_of(format);
  const size_t beyond = master == Master::none        ? 0
                        : master == Master::remainder ? sizeof(uint16_t)
                                                      : sizeof(float);
  layout.total = layout.remainder + aligned(static_cast<size_t>(elements) * beyond);
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
