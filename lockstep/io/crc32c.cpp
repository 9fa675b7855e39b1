// SPDX-License-Identifier: Apache-2.0
#include "lockstep/io/crc32c.h"

#include <array>
#include <bit>
#include <cstring>

#include "lockstep/io/crc32c_kernels.h"

namespace lockstep::io {
namespace {

static_assert(std::endian::native == std::endian::little, "files are little-endian, and so are we");

// kTables[k][b]: what byte b does to the register once k more bytes have followed it.
constexpr auto kTables = [] {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t state = byte;
    for (int bit = 0; bit < 8; ++bit) {
      state = (state >> 1) ^ ((state & 1) != 0 ? 0x82F63B78u : 0u);
    }
    tables[0][byte] = state;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 0xFF];
    }
  }
  return tables;
}();

}  // namespace

uint32_t detail::crc32c_table(uint32_t state, const void* bytes, size_t size) {
  const auto* next = static_cast<const unsigned char*>(bytes);
  for (; size >= 8; size -= 8, next += 8) {
    uint64_t word = 0;
    std::memcpy(&word, next, 8);
    word ^= state;
    state = 0;
#pragma GCC unroll 8
    for (size_t i = 0; i < 8; ++i) state ^= kTables[7 - i][(word >> (8 * i)) & 0xFF];
  }
  for (; size > 0; --size, ++next) state = (state >> 8) ^ kTables[0][(state ^ *next) & 0xFF];
  return state;
}

void Crc32c::update(std::span<const std::byte> bytes) {
  static const auto kernel =
      detail::has_crc32c_instructions() ? detail::crc32c_hardware : detail::crc32c_table;
  state_ = kernel(state_, bytes.data(), bytes.size());
}

uint32_t crc32c(std::span<const std::byte> bytes) {
  Crc32c crc;
  crc.update(bytes);
  return crc.value();
}

}  // namespace lockstep::io
