// SPDX-License-Identifier: Apache-2.0
#include "lockstep/plan/gather_arena.h"

#include <gtest/gtest.h>

#include <vector>

namespace lockstep::plan {
namespace {

int64_t bytes(const std::vector<LineUse>& uses) { return gathered_bytes(uses); }

TEST(Gather, HoldsTheUsedUnitAndTheNextOne) {
  EXPECT_EQ(bytes({}), 0);
  EXPECT_EQ(bytes({{0, 100}}), 100);
  EXPECT_EQ(bytes({{0, 100}, {0, 100}}), 100);
  EXPECT_EQ(bytes({{0, 100}, {1, 100}}), 200);
  EXPECT_EQ(bytes({{0, 100}, {1, 100}, {2, 100}, {3, 100}, {2, 100}, {1, 100}, {0, 100}}), 200);
}

TEST(Gather, AGapThatIsTooSmallIsNotReused) {
  // A small one at the front: the second large one goes behind the first.
  EXPECT_EQ(bytes({{0, 10}, {1, 100}, {2, 100}, {3, 100}}), 210);
  // At the end, the small one takes the gap.
  EXPECT_EQ(bytes({{0, 10}, {1, 100}, {2, 100}, {0, 10}, {2, 100}, {1, 100}}), 210);
}

TEST(Gather, BuffersOfSimilarSizesReuseEachOthersPlaces) {
  // Places of 100 each; the last one leaves a part of its own untouched.
  EXPECT_EQ(bytes({{0, 90}, {1, 100}, {2, 80}, {3, 100}}), 200);
  EXPECT_EQ(bytes({{0, 100}, {1, 60}}), 160);
}

}  // namespace
}  // namespace lockstep::plan
