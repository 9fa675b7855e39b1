// SPDX-License-Identifier: Apache-2.0
// The loops over elements, compiled once for each instruction set that matters (LOCKSTEP_ISA) and
// chosen at run time. Every operation is rounded by itself, none is fused: the bits do not depend
// on the instruction set. Private: not installed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lockstep/codec/codec.h"

namespace lockstep::codec {

struct DynamicMap;

namespace detail {

// For `count` elements that begin at a block. `scales` has one for each block, and is null for
// codecs without.
using EncodeKernel = void (*)(const float* values, std::byte* codes, float* scales, int64_t count,
                              const DynamicMap& map);
using DecodeKernel = void (*)(const std::byte* codes, const float* scales, float* values,
                              int64_t count, const DynamicMap& map);

// Null for lossless. int8 and quantization are for values of one sign only where `non_negative`.
struct Kernels {
  EncodeKernel (*encode)(Codec codec, Sign sign);
  DecodeKernel (*decode)(Codec codec, Sign sign);
};

namespace baseline {
extern const Kernels kKernels;
}
namespace x86_v3 {  // AVX2, F16C
extern const Kernels kKernels;
}

// The best that this processor can run.
const Kernels& kernels();
const DynamicMap& map_of(Sign sign);

}  // namespace detail
}  // namespace lockstep::codec
