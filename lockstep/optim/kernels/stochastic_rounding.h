// SPDX-License-Identifier: Apache-2.0
// How moments are rounded to bfloat16, and by which random numbers. For C++ and CUDA: the same bits
// everywhere. Private: not installed.
#pragma once

#include <cstdint>

#include "lockstep/core/philox.h"

namespace lockstep::optim::detail {

// The bits of the bfloat16 above or below, in magnitude: above where `random`, a uniform number of
// 16 bits, carries out of the bits that are cut off. So the mean over all random numbers is the
// value itself. A finite value stays finite; infinity and NaN stay what they are.
LOCKSTEP_HOST_DEVICE uint16_t stochastic_bfloat16(float value, uint32_t random) {
  constexpr uint32_t kInfinity = 0x7f800000, kQuiet = 0x400000;
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const uint32_t carried = bits + random;
  const uint32_t kept = (bits & 0x7fffffff) > kInfinity ? bits | kQuiet : bits;
  // No branches: loops with them are not vectorised.
  const bool is_finite = ((bits & kInfinity) != kInfinity) & ((carried & kInfinity) != kInfinity);
  return static_cast<uint16_t>((is_finite ? carried : kept) >> 16);
}

// The random numbers of one step for neighbouring elements of a parameter: a function of their
// places in the whole tensor. There they are runs of `length` elements that begin `stride` apart.
struct MomentDraws {
  RandomKey key;
  int64_t first, length, stride;

  // Place of element `i` in the whole tensor.
  LOCKSTEP_HOST_DEVICE int64_t place(int64_t i) const {
    return i < length ? first + i : first + i / length * stride + i % length;
  }
};

// What becomes of an element's word.
LOCKSTEP_HOST_DEVICE uint32_t for_exp_avg(uint32_t word) { return word & 0xffff; }
LOCKSTEP_HOST_DEVICE uint32_t for_exp_avg_sq(uint32_t word) { return word >> 16; }

}  // namespace lockstep::optim::detail
