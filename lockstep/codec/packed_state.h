// SPDX-License-Identifier: Apache-2.0
// The bytes of a slice's optimizer state: its moments (AdamW's exp_avg and exp_avg_sq, SGD's
// momentum_buffer) and, for a parameter of 16 bits, its float32 master or what that has beyond the
// parameter itself.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lockstep/codec/codec.h"
#include "lockstep/core/dtype.h"

namespace lockstep::codec {

struct PackedFormat {
  DType param = DType::float32;    // or float64, float16, bfloat16
  DType grad = DType::float32;     // any of these; float64 for a parameter of float64
  Codec exp_avg = Codec::none;     // the first moment's; not lossless, none for float64
  Codec exp_avg_sq = Codec::none;  // the second's
  // The parameter is float32 in two parts (master.h), which are stored next to the state: bf16,
  // int8 or quantization. none: it is as `param` says.
  Codec weight = Codec::none;
  int moments = 2;  // 2: AdamW, 1: SGD with momentum, 0: SGD without
};

// How the state has the float32 master of a parameter of 16 bits. AdamW's of bfloat16 is kept in 16
// bits in addition to the parameter, and the sign of exp_avg_sq; others have nothing to mark ties
// with.
enum class Master { none, remainder, whole };
Master master_of(const PackedFormat& format);
// What moments are without a codec.
inline DType moment_dtype(const PackedFormat& format) {
  return format.param == DType::float64 ? DType::float64 : DType::float32;
}

// Where the parts begin in the block of a slice, in bytes; each at a multiple of 256. What there is
// none of is empty; `remainder` may also be the whole master.
struct PackedLayout {
  size_t exp_avg = 0, exp_avg_sq = 0, remainder = 0, total = 0;
};
PackedLayout packed_layout(const PackedFormat& format, int64_t elements);

// Where the parts of a coded parameter begin, in bytes, each at a multiple of 256: codes, scales
// and, after `remainder` bytes of these, a byte for each element.
struct CodedLayout {
  size_t scales = 0, remainder = 0, total = 0;
};
CodedLayout coded_layout(Codec codec, int64_t elements);

}  // namespace lockstep::codec
