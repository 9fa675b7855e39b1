// SPDX-License-Identifier: Apache-2.0
// The loop of checksums on the CPU. It is a source of its own because it becomes vector
// instructions, which the options of the other sources in this folder do not make.
#include <algorithm>
#include <array>

#include "lockstep/train/integrity/checksum_words.h"

namespace lockstep::train::detail {
namespace {

constexpr auto kPlaces = [] {
  std::array<uint32_t, kRow> factors{};
  for (uint32_t place = 0; place < kRow; ++place) factors[place] = place * kPlaceFactor | 1U;
  return factors;
}();

// Compilers make vectors of a loop whose length they know.
template <class Word>
uint64_t row_sum(const Word* words, const uint32_t* factors, uint64_t count) {
  uint64_t sum = 0;
  if (count == kRow) {
    for (uint64_t i = 0; i < kRow; ++i) sum += uint64_t{words[i]} * factors[i];
  } else {
    for (uint64_t i = 0; i < count; ++i) sum += uint64_t{words[i]} * factors[i];
  }
  return sum;
}

}  // namespace

template <class Word>
uint64_t sum_of_words(const Word* words, uint64_t count, uint64_t first) {
  uint64_t sum = 0;
  for (uint64_t at = 0; at < count;) {
    const uint64_t row = (first + at) / kRow, place = (first + at) % kRow;
    const uint64_t length = std::min(kRow - place, count - at);
    sum += row_sum(words + at, kPlaces.data() + place, length) * (row * kRowFactor | 1U);
    at += length;
  }
  return sum;
}

template uint64_t sum_of_words(const uint32_t*, uint64_t, uint64_t);
template uint64_t sum_of_words(const uint16_t*, uint64_t, uint64_t);
template uint64_t sum_of_words(const uint8_t*, uint64_t, uint64_t);

}  // namespace lockstep::train::detail
