// SPDX-License-Identifier: Apache-2.0
// Built with the processor's CRC instructions switched on (lockstep/CMakeLists.txt), so it includes
// nothing whose inline functions could be called elsewhere.
#include <cstring>

#include "lockstep/io/crc32c_kernels.h"

#if defined(__aarch64__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace lockstep::io::detail {

#if defined(__aarch64__)

bool has_crc32c_instructions() { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
static uint32_t step8(uint32_t state, uint64_t word) { return __crc32cd(state, word); }
static uint32_t step1(uint32_t state, unsigned char byte) { return __crc32cb(state, byte); }

#elif defined(__x86_64__)

bool has_crc32c_instructions() { return __builtin_cpu_supports("sse4.2") != 0; }
static uint32_t step8(uint32_t state, uint64_t word) {
  return static_cast<uint32_t>(_mm_crc32_u64(state, word));
}
static uint32_t step1(uint32_t state, unsigned char byte) { return _mm_crc32_u8(state, byte); }

#endif

#if defined(__aarch64__) || defined(__x86_64__)

namespace {

// One instruction follows another's result by 2 or 3 cycles, so three blocks are done at a time.
// Joining them takes the register of a block past the zeros that stand for the next one; that is
// linear in the register's bits, and done by table, one for each of its bytes.
constexpr size_t kBlock = 2048;

struct SkipBlock {
  uint32_t table[4][256];

  SkipBlock() {
    for (int byte = 0; byte < 4; ++byte) {
      uint32_t bits[8];
      for (int bit = 0; bit < 8; ++bit) {
        uint32_t state = uint32_t{1} << (8 * byte + bit);
        for (size_t done = 0; done < kBlock; done += 8) state = step8(state, 0);
        bits[bit] = state;
      }
      for (uint32_t value = 0; value < 256; ++value) {
        uint32_t sum = 0;
        for (int bit = 0; bit < 8; ++bit) sum ^= (value >> bit & 1) != 0 ? bits[bit] : 0;
        table[byte][value] = sum;
      }
    }
  }

  uint32_t operator()(uint32_t state) const {
    return table[0][state & 0xFF] ^ table[1][state >> 8 & 0xFF] ^ table[2][state >> 16 & 0xFF] ^
           table[3][state >> 24];
  }
};

uint64_t word_at(const unsigned char* bytes) {
  uint64_t word = 0;
  std::memcpy(&word, bytes, 8);
  return word;
}

}  // namespace

uint32_t crc32c_hardware(uint32_t state, const void* bytes, size_t size) {
  static const SkipBlock skip_block;
  const auto* next = static_cast<const unsigned char*>(bytes);
  for (; size >= 3 * kBlock; size -= 3 * kBlock, next += 3 * kBlock) {
    uint32_t second = 0;
    uint32_t third = 0;
    for (size_t i = 0; i < kBlock; i += 8) {
      state = step8(state, word_at(next + i));
      second = step8(second, word_at(next + kBlock + i));
      third = step8(third, word_at(next + 2 * kBlock + i));
    }
    state = skip_block(skip_block(state) ^ second) ^ third;
  }
  for (; size >= 8; size -= 8, next += 8) state = step8(state, word_at(next));
  for (; size > 0; --size, ++next) state = step1(state, *next);
  return state;
}

#else

bool has_crc32c_instructions() { return false; }
uint32_t crc32c_hardware(uint32_t state, const void* bytes, size_t size) {
  return crc32c_table(state, bytes, size);
}

#endif

}  // namespace lockstep::io::detail
