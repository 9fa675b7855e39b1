// SPDX-License-Identifier: Apache-2.0
// How compressed bytes lie: a Head, then chunks. A chunk's bytes are sorted into planes, the first
// byte of every element, then the second, and so on, because the exponents of floats are alike and
// their last bits are not. Each plane is a 32-bit length and so many bytes of LZ4, or the plane as
// it is where the length has kRaw. All numbers are little-endian. Private: not installed.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

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

}  // namespace lockstep::codec::detail
