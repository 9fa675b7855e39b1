// SPDX-License-Identifier: Apache-2.0
#include "lockstep/fabric/copy.h"

#include <cstdint>
#include <cstring>

#ifdef __x86_64__
#include <emmintrin.h>
#endif

namespace lockstep::fabric {
namespace {

#ifdef __x86_64__
// An ordinary store first fetches the line it overwrites, often from another core. Measured on a
// 16-core Xeon: 64 MB out of a peer's memory in 4.9 ms instead of 13.4 ms. The library's own
// threshold for this is a share of the largest cache, hundreds of megabytes on such machines.
constexpr size_t kStreamBytes = size_t{1} << 20;

void stream(std::byte* to, const std::byte* from, size_t bytes) {
  const size_t head = (16 - reinterpret_cast<uintptr_t>(to) % 16) % 16;
  std::memcpy(to, from, head);
  to += head;
  from += head;
  bytes -= head;
  const size_t blocks = bytes / 64;
  for (size_t i = 0; i < blocks; ++i, to += 64, from += 64) {
    const auto* source = reinterpret_cast<const __m128i*>(from);
    auto* target = reinterpret_cast<__m128i*>(to);
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  _mm_sfence();
  std::memcpy(to, from, bytes % 64);
}
#endif

}  // namespace

void copy_bytes(std::byte* to, const std::byte* from, size_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

void copy_result(std::byte* to, const std::byte* from, size_t bytes) {
#ifdef __x86_64__
  if (bytes >= kStreamBytes && to != from) return stream(to, from, bytes);
#endif
  copy_bytes(to, from, bytes);
}

}  // namespace lockstep::fabric
