// SPDX-License-Identifier: Apache-2.0
// Many damaged headers: each is read as a file that keeps all rules, or refused; never anything
// else.
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "lockstep/core/error.h"
#include "lockstep/formats/dtype_names.h"
#include "lockstep/formats/safetensors_header.h"
#include "tests/formats/mutate.h"
#include "tests/support/sampling.h"

namespace lockstep::formats {
namespace {

const std::string kHeader = R"({"__metadata__":{"format":"pt","DCP_VERSION":"1.0"},)"
                            R"("w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
                            R"("s":{"dtype":"F32","shape":[],"data_offsets":[24,28]},)"
                            R"("e":{"dtype":"BF16","shape":[0,4],"data_offsets":[28,28]},)"
                            R"("b":{"dtype":"BF16","shape":[1,3],"data_offsets":[28,34]}})";
constexpr size_t kData = 34;

const char* const kHeaderPieces[] = {"{",
                                     "}",
                                     "[",
                                     "]",
                                     ",",
                                     ":",
                                     "\"",
                                     "\\u0000",
                                     "null",
                                     "1e400",
                                     "-1",
                                     "18446744073709551615",
                                     "9223372036854775807",
                                     "0",
                                     "28",
                                     "\"shape\":[1],",
                                     "\"w\":",
                                     "F4",
                                     "F64",
                                     "\xff",
                                     " ",
                                     "[[[[[[[["};

TEST(SafetensorsMutations, AMutatedFileIsValidOrRefused) {
  std::mt19937 random(1);
  int valid = 0;
  const int mutants = test::tests_all() ? 1'000'000 : 30'000;
  for (int i = 0; i < mutants; ++i) {
    const auto header = test_support::mutate(kHeader, random, kHeaderPieces);
    uint64_t size = header.size();
    if (random() % 16 == 0) size ^= uint64_t{1} << (random() % 64);
    std::string file(8, '\0');
    std::memcpy(file.data(), &size, 8);
    file += header + std::string(kData + (random() % 16 == 0 ? random() % 9 : 0), 'x');
    try {
      const auto parsed = parse_safetensors(std::as_bytes(std::span(file)), file.size(), "f");
      ++valid;
      uint64_t end = 0;
      for (const auto& entry : parsed.entries) {
        ASSERT_EQ(entry.begin, end);
        ASSERT_EQ(byte_size(entry.dtype, entry.shape), static_cast<int64_t>(entry.size()));
        end = entry.end;
      }
      ASSERT_EQ(parsed.data_begin + end, file.size());
    } catch (const CheckpointError&) {
    }
  }
  // Changed names and white space do no harm; most changes do.
  EXPECT_GT(valid, mutants / 100);
  EXPECT_LT(valid, mutants / 3);
}

}  // namespace
}  // namespace lockstep::formats
