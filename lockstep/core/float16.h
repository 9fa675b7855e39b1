// SPDX-License-Identifier: Apache-2.0
// The two 16-bit floats as kernels see them.
//
// Functions have internal linkage: files that are built for several instruction sets must not share
// one copy of them.
#pragma once

#include <bit>
#include <cstdint>

namespace lockstep {

#ifdef __aarch64__
using Half = __fp16;
#else
using Half = _Float16;
#endif

struct BFloat16 {
  uint16_t bits;
};

static inline float widen(Half stored) { return static_cast<float>(stored); }
static inline float widen(BFloat16 stored) {
  return std::bit_cast<float>(static_cast<uint32_t>(stored.bits) << 16);
}

// To nearest even, in the upper 16 bits. Not for NaN.
static inline uint32_t rounded_to_upper_half(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return bits + 0x7fff + ((bits >> 16) & 1);
}

template <class T>
static inline T narrow(float value) {
  return static_cast<T>(value);
}
template <>
inline BFloat16 narrow<BFloat16>(float value) {
  // A NaN keeps its upper bits and stays a NaN.
  const uint32_t quiet = std::bit_cast<uint32_t>(value) | 0x400000;
  return {static_cast<uint16_t>((value != value ? quiet : rounded_to_upper_half(value)) >> 16)};
}

}  // namespace lockstep
