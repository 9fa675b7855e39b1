// SPDX-License-Identifier: Apache-2.0
// What CPU and GPU compute alike for a checksum. Private: not installed.
#pragma once

#include <cstdint>

namespace lockstep::train::detail {

// Bits of a tensor: words of 1, 2 or 4 bytes, and the place of the first in the tensor.
struct Words {
  const void* data;
  int64_t width, count;
  uint64_t first;
};

// A checksum is the sum modulo 2^64 of all words, each times two odd numbers: one of its row of 256
// words, one of its place in the row.
constexpr uint64_t kRow = 256;
constexpr uint64_t kRowFactor = 0x9e3779b97f4a7c15U;  // of row r: r * kRowFactor | 1
constexpr uint32_t kPlaceFactor = 2654435761U;        // of place p: p * kPlaceFactor | 1

// The sum of `count` words, the first of which is number `first` of the tensor. On the CPU, for
// words of 1, 2 and 4 bytes.
template <class Word>
uint64_t sum_of_words(const Word* words, uint64_t count, uint64_t first);

// Adds the sum of these to a number on the device, in the order of `stream`.
void launch_sum(const Words& words, int64_t* sum, void* stream);

}  // namespace lockstep::train::detail
