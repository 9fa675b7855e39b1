// SPDX-License-Identifier: Apache-2.0
// How compressed bytes lie: a Head, then chunks. A chunk's bytes are sorted into planes, the first
// byte of every element, then the second, and so on, because the exponents of floats are alike and
// their last bits are not. Each plane is a 32-bit length and so many bytes of LZ4, or the plane as
// it is where the length has kRaw. All numbers are little-endian. Private: not installed.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace lockstep::codec::detail {

static_assert(std::endian::native == std::endian::little);

struct Head {
  uint64_t checksum;  // of all that follows it
  uint64_t bytes;     // once decompressed
  uint32_t width;     // bytes of an element
  uint32_t magic;
};
inline constexpr uint32_t kMagic = 0x315a4c4c;  // "LLZ1"
inline constexpr uint32_t kRaw = 0x80000000;
inline constexpr size_t kMaxWidth = 16;

// Bytes of a chunk but the last: whole elements.
inline constexpr size_t chunk_bytes(size_t width) { return size_t{65536} / width * width; }

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

}  // namespace lockstep::codec::detail
