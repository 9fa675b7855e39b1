// SPDX-License-Identifier: Apache-2.0
#include "lockstep/layout/rank_map.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "lockstep/core/error.h"
#include "tests/support/says.h"

namespace lockstep::layout {
namespace {

using test::says;
using testing::ThrowsMessage;

TEST(ParallelDims, DefaultIsOneRank) {
  EXPECT_EQ(ParallelDims{}, (ParallelDims{.dp = 1, .tp = 1, .pp = 1}));
  EXPECT_EQ(ParallelDims{}.world_size(), 1);
  EXPECT_NO_THROW(ParallelDims{}.validate(1));
}

TEST(ParallelDims, ProductMustEqualWorldSize) {
  EXPECT_NO_THROW((ParallelDims{2, 2, 3}.validate(12)));
  EXPECT_THAT(
      [] {
        ParallelDims({2, 2, 3}).validate(8);
      },
      ThrowsMessage<ConfigError>(
          says("[parallel_dims] ... dp 2 x tp 2 x pp 3 = 12 ... world size 8")));
}

TEST(ParallelDims, EverySizeIsAtLeastOne) {
  EXPECT_THAT(
      [] {
        ParallelDims({0, 2, 3}).validate(0);
      },
      ThrowsMessage<ConfigError>(
          says("[parallel_dims] ... dp 0 x tp 2 x pp 3: every size ... at least 1")));
  // Two negative sizes have the right product.
  EXPECT_THROW(ParallelDims({-2, -2, 2}).validate(8), ConfigError);
  EXPECT_THROW(ParallelDims({1, 0, 1}).validate(), ConfigError);
  EXPECT_THROW(ParallelDims({1, 1, -1}).validate(), ConfigError);
}

TEST(ParallelDims, HugeSizesDoNotWrapAround) {
  constexpr int kHuge = 1 << 30;
  EXPECT_EQ((ParallelDims{kHuge, kHuge, 1 << 4}.world_size()), std::numeric_limits<int64_t>::max());
  EXPECT_THROW(ParallelDims({kHuge, kHuge, 1 << 4}).validate(0), ConfigError);
}

}  // namespace
}  // namespace lockstep::layout
