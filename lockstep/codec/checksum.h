// SPDX-License-Identifier: Apache-2.0
// A quick checksum of bytes in memory. Private: not installed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace lockstep::codec {

// Every step can be undone, so that no change of a single word goes unseen; four at a time, because
// each waits for the one before.
inline uint64_t checksum(std::span<const std::byte> bytes) {
  constexpr uint64_t kOdd = 0x9e3779b97f4a7c15;
  const auto mix = [](uint64_t sum, uint64_t word) {
    sum = (sum ^ word) * kOdd;
    return sum ^ (sum >> 32);
  };
  uint64_t sums[4] = {1, 2, 3, 4};
  const size_t whole = bytes.size() / 32 * 32;
  for (size_t i = 0; i < whole; i += 32) {
    uint64_t words[4];
    std::memcpy(words, bytes.data() + i, sizeof words);
    for (int k = 0; k < 4; ++k) sums[k] = mix(sums[k], words[k]);
  }
  for (size_t i = whole; i < bytes.size(); ++i) {
    sums[0] = mix(sums[0], static_cast<uint64_t>(bytes[i]));
  }
  uint64_t sum = bytes.size();
  for (const uint64_t part : sums) sum = mix(sum, part);
  return sum;
}

}  // namespace lockstep::codec
