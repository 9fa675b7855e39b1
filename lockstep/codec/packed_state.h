// SPDX-License-Identifier: Apache-2.0
// The bytes of a slice's AdamW state: exp_avg, exp_avg_sq and, for a parameter of bfloat16, what
// its float32 master has beyond the parameter itself.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lockstep/codec/codec.h"
#include "lockstep/core/dtype.h"

namespace lockstep::codec {

struct PackedFormat {
  DType param = DType::float32;    // or bfloat16
  DType grad = DType::float32;     // or bfloat16
  Codec exp_avg = Codec::none;     // not lossless
  Codec exp_avg_sq = Codec::none;  // not lossless
  // The parameter is float32 in two parts (master.h), which are stored next to the state: bf16,
  // int8 or quantization. none: it is as `param` says.
  Codec weight = Codec::none;
};

// Where the parts begin in the block of a slice, in bytes; each at a multiple of 256. `remainder`
// is empty for float32.
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
