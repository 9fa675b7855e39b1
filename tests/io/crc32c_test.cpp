// SPDX-License-Identifier: Apache-2.0
#include "lockstep/io/crc32c.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <numeric>
#include <string_view>
#include <vector>

#include "lockstep/io/crc32c_kernels.h"

namespace lockstep::io {
namespace {

uint32_t of(std::string_view text) { return crc32c(std::as_bytes(std::span(text))); }

std::vector<std::byte> random_bytes(size_t size) {
  std::vector<std::byte> bytes(size);
  uint64_t state = 1;
  for (auto& byte : bytes) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    byte = static_cast<std::byte>(state >> 56);
  }
  return bytes;
}

// RFC 3720, B.4, and the check value of the CRC catalogues.
TEST(Crc32c, KnownValues) {
  EXPECT_EQ(of(""), 0u);
  EXPECT_EQ(of("123456789"), 0xE3069283u);
  EXPECT_EQ(crc32c(std::vector<std::byte>(32)), 0x8A9136AAu);
  EXPECT_EQ(crc32c(std::vector<std::byte>(32, std::byte{0xFF})), 0x62A8AB43u);
  std::vector<std::byte> rising(32);
  for (size_t i = 0; i < 32; ++i) rising[i] = static_cast<std::byte>(i);
  EXPECT_EQ(crc32c(rising), 0x46DD794Eu);
}

TEST(Crc32c, PiecesGiveTheWhole) {
  const auto bytes = random_bytes(20'000);
  const std::span<const std::byte> all(bytes);
  for (const size_t cut : {0, 1, 7, 8, 9, 6143, 6144, 6145, 12'289, 19'999, 20'000}) {
    Crc32c crc;
    crc.update(all.first(cut));
    crc.update(all.subspan(cut));
    EXPECT_EQ(crc.value(), crc32c(all)) << cut;
  }
}

TEST(Crc32c, InstructionsAndTableAgree) {
  if (!detail::has_crc32c_instructions()) return;  // then the table is all there is
  const auto bytes = random_bytes(40'000);
  for (size_t size = 0; size < 40'000; size = size < 70 ? size + 1 : size * 5 / 4) {
    for (size_t begin = 0; begin < 8 && begin + size <= bytes.size(); ++begin) {
      ASSERT_EQ(detail::crc32c_hardware(begin * 77, bytes.data() + begin, size),
                detail::crc32c_table(begin * 77, bytes.data() + begin, size))
          << begin << " + " << size;
    }
  }
}

TEST(Crc32c, Speed) {
  const auto bytes = random_bytes(size_t{8} << 20);
  for (const auto kernel : {detail::crc32c_table, detail::crc32c_hardware}) {
    if (kernel == detail::crc32c_hardware && !detail::has_crc32c_instructions()) continue;
    double best = 0;
    uint32_t state = 0;
    for (int round = 0; round < 4; ++round) {
      const auto start = std::chrono::steady_clock::now();
      state ^= kernel(0, bytes.data(), bytes.size());
      const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
      best = std::max(best, static_cast<double>(bytes.size()) / time.count() / 1e9);
    }
    RecordProperty(kernel == detail::crc32c_table ? "table_GB_s" : "instructions_GB_s",
                   std::to_string(best));
    EXPECT_EQ(state, 0u);  // four times the same
  }
}

}  // namespace
}  // namespace lockstep::io
