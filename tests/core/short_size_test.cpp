#include "lockstep/core/short_size.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

TEST(ShortSize, ThreeDigits) {
  EXPECT_EQ(short_size(0), "0 B");
  EXPECT_EQ(short_size(999), "999 B");
  EXPECT_EQ(short_size(1536), "1.50 kB");
  EXPECT_EQ(short_size(12 << 20), "12.0 MB");
  EXPECT_EQ(short_size(int64_t{300} << 30), "300 GB");
  EXPECT_EQ(short_size(int64_t{5} << 50), "5120 TB");
}

}  // namespace
}  // namespace lockstep
