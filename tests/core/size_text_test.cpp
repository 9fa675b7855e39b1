// SPDX-License-Identifier: Apache-2.0
#include "lockstep/core/size_text.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

TEST(SizeText, ThreeDigitsWithoutZerosAtTheEnd) {
  const struct {
    int64_t bytes;
    const char* text;
  } cases[] = {{0, "0 B"},
               {999, "999 B"},
               {1000, "0.98 kB"},
               {1024, "1 kB"},
               {1536, "1.5 kB"},
               {int64_t{80} << 20, "80 MB"},
               {int64_t{100} << 20, "100 MB"},
               {int64_t{2} << 30, "2 GB"},
               {(int64_t{3} << 30) + (1 << 28), "3.25 GB"},
               {int64_t{1} << 50, "1 PB"},
               {int64_t{2000} << 50, "2000 PB"},
               {-(int64_t{2} << 30), "-2 GB"},
               // Rounding never makes four digits of three.
               {(int64_t{1} << 20) - 1, "1 MB"},
               {10235, "10 kB"},
               {1023488, "0.98 MB"}};
  for (const auto& [bytes, text] : cases) EXPECT_EQ(size_text(bytes), text) << bytes;
}

}  // namespace
}  // namespace lockstep
