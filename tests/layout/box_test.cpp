// SPDX-License-Identifier: Apache-2.0
#include "lockstep/layout/box.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <tuple>

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

// All boxes in a small space, but for the empty ones.
std::vector<Box> boxes_in(int64_t a, int64_t b, int64_t c) {
  std::vector<Box> boxes;
  const auto ranges = [](int64_t size) {
    std::vector<Range> all;
    for (int64_t begin = 0; begin < size; ++begin) {
      for (int64_t end = begin + 1; end <= size; ++end) all.push_back({begin, end});
    }
    return all;
  };
  for (const Range& x : ranges(a)) {
    for (const Range& y : ranges(b)) {
      for (const Range& z : ranges(c)) boxes.push_back({{x, y, z}});
    }
  }
  return boxes;
}

// Numbers of the elements of a box of a (2, 3, 3) tensor, in its own order.
std::vector<int64_t> elements(const Box& box) {
  std::vector<int64_t> all;
  const auto& [x, y, z] = std::tie(box.ranges[0], box.ranges[1], box.ranges[2]);
  for (int64_t i = x.begin; i < x.end; ++i) {
    for (int64_t j = y.begin; j < y.end; ++j) {
      for (int64_t k = z.begin; k < z.end; ++k) all.push_back((i * 3 + j) * 3 + k);
    }
  }
  return all;
}

TEST(Box, RunsCopyWhatTwoBoxesShare) {
  const auto boxes = boxes_in(2, 3, 3);
  for (const Box& from : boxes) {
    for (const Box& to : boxes) {
      const Box part = from.intersect(to);
      const auto source = elements(from), wanted = elements(to), shared = elements(part);
      std::vector<int64_t> copied;
      int64_t end_from = -1, end_to = -1;
      for_each_run(part, from, to, [&](const layout::ContiguousRun& run) {
        // As long as they can be.
        ASSERT_FALSE(run.from == end_from && run.to == end_to);
        end_from = run.from + run.size;
        end_to = run.to + run.size;
        for (int64_t i = 0; i < run.size; ++i) {
          copied.push_back(source.at(static_cast<size_t>(run.from + i)));
          ASSERT_EQ(wanted.at(static_cast<size_t>(run.to + i)), copied.back());
        }
      });
      ASSERT_EQ(copied, shared);
    }
  }
  const Box scalar = Box::whole({});
  int calls = 0;
  for_each_run(scalar, scalar, scalar,
               [&](const layout::ContiguousRun& run) { calls += run.size == 1; });
  EXPECT_EQ(calls, 1);
}

TEST(Box, SubtractLeavesWhatTheCutHasNot) {
  const Box whole{{{0, 4}, {0, 6}}}, hole{{{1, 3}, {2, 9}}};
  const auto rest = subtract({whole}, hole);
  int64_t left = 0;
  for (const Box& box : rest) {
    EXPECT_TRUE(whole.contains(box));
    EXPECT_TRUE(box.intersect(hole).empty());
    left += box.numel();
  }
  EXPECT_EQ(left, 24 - 8);
  EXPECT_EQ(subtract({whole}, {{{4, 5}, {0, 6}}}), std::vector<Box>{whole});
  EXPECT_TRUE(subtract(rest, whole).empty());
}

TEST(Box, PiecesAreRunsInOrder) {
  for (const Box& box : boxes_in(2, 3, 3)) {
    for (int64_t most = 1; most <= 19; ++most) {
      std::vector<int64_t> all;
      for (const Box& piece : pieces(box, most)) {
        ASSERT_LE(piece.numel(), most);
        ASSERT_FALSE(piece.empty());
        int runs = 0;
        for_each_run(piece, box, piece, [&](const layout::ContiguousRun&) { ++runs; });
        ASSERT_EQ(runs, 1) << piece.describe() << " of " << box.describe();
        const auto more = elements(piece);
        all.insert(all.end(), more.begin(), more.end());
      }
      ASSERT_EQ(all, elements(box));
    }
  }
  EXPECT_TRUE(pieces(Box::whole({0, 4}), 2).empty());
  EXPECT_THROW(pieces(Box::whole({4}), 0), ConfigError);
}

}  // namespace
}  // namespace lockstep::layout
