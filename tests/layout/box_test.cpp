#include "lockstep/layout/box.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/core/error.h"

namespace lockstep::layout {
namespace {

TEST(Box, WholeTensor) {
  EXPECT_EQ(Box::whole({4, 6}), (Box{{{0, 4}, {0, 6}}}));
  EXPECT_EQ(Box::whole({4, 6}).numel(), 24);
  EXPECT_EQ(Box::whole({4, 6}).describe(), "[0:4, 0:6]");
  EXPECT_TRUE(Box::whole({4, 0}).empty());
}

TEST(Box, ScalarIsOneRow) {
  EXPECT_EQ(Box::whole({}), (Box{{{0, 1}}}));
  EXPECT_EQ(Box::whole({}).numel(), 1);
  EXPECT_TRUE((Box{{{0, 0}}}.empty()));
}

TEST(Box, Contains) {
  const Box box{{{2, 6}, {0, 3}}};
  EXPECT_TRUE(box.contains(box));
  EXPECT_TRUE(box.contains({{{3, 4}, {1, 3}}}));
  EXPECT_FALSE(box.contains({{{1, 4}, {1, 3}}}));
  EXPECT_FALSE(box.contains({{{3, 4}, {1, 4}}}));
  EXPECT_TRUE(box.contains({{{9, 9}, {1, 4}}})) << "nothing is inside everything";
  EXPECT_THROW(box.contains({{{0, 1}}}), ConfigError);
}

// Against a count of the points that lie in both.
TEST(Box, IntersectionOfAllSmallBoxes) {
  std::vector<Range> ranges;
  for (int64_t begin = 0; begin <= 3; ++begin) {
    for (int64_t end = begin; end <= 3; ++end) ranges.push_back({begin, end});
  }
  std::vector<Box> boxes;
  for (const auto& rows : ranges) {
    for (const auto& columns : ranges) boxes.push_back({{rows, columns}});
  }
  const auto has = [](const Box& box, int64_t row, int64_t column) {
    return box.contains({{{row, row + 1}, {column, column + 1}}});
  };
  for (const auto& a : boxes) {
    for (const auto& b : boxes) {
      const auto common = a.intersect(b);
      int64_t points = 0;
      for (int64_t row = 0; row < 3; ++row) {
        for (int64_t column = 0; column < 3; ++column) {
          const bool both = has(a, row, column) && has(b, row, column);
          ASSERT_EQ(has(common, row, column), both);
          points += both;
        }
      }
      ASSERT_EQ(common.numel(), points);
      ASSERT_EQ(b.intersect(a), common);
      ASSERT_TRUE(a.contains(common));
    }
  }
}

TEST(Box, DisjointRangesAreEmptyNotReversed) {
  const Range apart = Range{0, 2}.intersect({5, 9});
  EXPECT_TRUE(apart.empty());
  EXPECT_EQ(apart.size(), 0);
}

}  // namespace
}  // namespace lockstep::layout
