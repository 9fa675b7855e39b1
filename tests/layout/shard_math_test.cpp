// SPDX-License-Identifier: Apache-2.0
#include "lockstep/layout/shard_math.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <set>

#include "lockstep/core/error.h"

namespace lockstep::layout {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::ThrowsMessage;

using Cut = Range (*)(int64_t, int64_t, int64_t);

std::vector<int64_t> sizes(Cut cut, int64_t total, int64_t parts) {
  std::vector<int64_t> all;
  for (int64_t i = 0; i < parts; ++i) all.push_back(cut(total, parts, i).size());
  return all;
}

TEST(ShardMath, CeilingChunks) {
  EXPECT_THAT(sizes(ceiling_chunk, 10, 4), ElementsAre(3, 3, 3, 1));
  EXPECT_THAT(sizes(ceiling_chunk, 5, 4), ElementsAre(2, 2, 1, 0));
  EXPECT_THAT(sizes(ceiling_chunk, 1, 3), ElementsAre(1, 0, 0));
  EXPECT_THAT(sizes(ceiling_chunk, 0, 2), ElementsAre(0, 0));
  EXPECT_EQ(ceiling_chunk(10, 4, 3), (Range{9, 10}));
  EXPECT_EQ(ceiling_chunk(5, 4, 3), (Range{5, 5}));
}

TEST(ShardMath, BalancedRanges) {
  EXPECT_THAT(sizes(balanced_range, 10, 4), ElementsAre(3, 3, 2, 2));
  EXPECT_THAT(sizes(balanced_range, 3, 4), ElementsAre(1, 1, 1, 0));
  EXPECT_EQ(balanced_range(10, 4, 2), (Range{6, 8}));
}

TEST(ShardMath, RangesTileExactly) {
  for (const Cut cut : {ceiling_chunk, balanced_range}) {
    for (int64_t total = 0; total <= 40; ++total) {
      for (int64_t parts = 1; parts <= 24; ++parts) {
        int64_t next = 0, previous = total;
        for (int64_t i = 0; i < parts; ++i) {
          const auto range = cut(total, parts, i);
          ASSERT_EQ(range.begin, next) << total << " over " << parts;
          ASSERT_LE(range.begin, range.end);
          ASSERT_LE(range.size(), previous) << "sizes never grow";
          next = range.end;
          previous = range.size();
        }
        ASSERT_EQ(next, total);
        if (cut == Cut{balanced_range}) {
          ASSERT_LE(cut(total, parts, 0).size() - cut(total, parts, parts - 1).size(), 1);
        }
      }
    }
  }
}

TEST(ShardMath, HugeTotalsDoNotOverflow) {
  constexpr auto kMax = std::numeric_limits<int64_t>::max();
  for (const Cut cut : {ceiling_chunk, balanced_range}) {
    EXPECT_EQ(cut(kMax, 4, 3).end, kMax);
    EXPECT_EQ(cut(kMax, 4, 3).begin, cut(kMax, 4, 2).end);
    EXPECT_EQ(cut(kMax, kMax, kMax - 1), (Range{kMax - 1, kMax}));
  }
  EXPECT_EQ(ceiling_chunk(kMax - 1, kMax, kMax - 1), (Range{kMax - 1, kMax - 1}));
}

TEST(ShardMath, PartsOutsideAreErrors) {
  EXPECT_THAT([] { ceiling_chunk(10, 4, 4); },
              ThrowsMessage<ConfigError>(HasSubstr("[ceiling_chunk] part 4 of 10 over 4 parts")));
  EXPECT_THROW(ceiling_chunk(10, 0, 0), ConfigError);
  EXPECT_THROW(ceiling_chunk(-1, 2, 0), ConfigError);
  EXPECT_THROW(balanced_range(10, 4, -1), ConfigError);
}

using Shards = std::vector<RowShard>;

TEST(CutRows, OneDimensionIsBalanced) {
  const std::vector<Shape> shapes = {{10}};
  EXPECT_THAT(cut_rows(shapes, 4), ElementsAre(Shards{{0, {0, 3}}}, Shards{{0, {3, 6}}},
                                               Shards{{0, {6, 8}}}, Shards{{0, {8, 10}}}));
}

TEST(CutRows, CutsMoveToTheNearestRow) {
  // 40 elements in rows of 4; cuts at 14 and 27 move to 16 (14 is as near to 12) and 28.
  const std::vector<Shape> shapes = {{10, 4}};
  EXPECT_THAT(cut_rows(shapes, 3),
              ElementsAre(Shards{{0, {0, 4}}}, Shards{{0, {4, 7}}}, Shards{{0, {7, 10}}}));
}

TEST(CutRows, TensorsLieEndToEnd) {
  // weight (3, 2), bias (3), scale (): 10 elements, cuts at 5 -> 6.
  const std::vector<Shape> shapes = {{3, 2}, {3}, {}};
  EXPECT_THAT(cut_rows(shapes, 2),
              ElementsAre(Shards{{0, {0, 3}}}, Shards{{1, {0, 3}}, {2, {0, 1}}}));
}

TEST(CutRows, WideRowsLeavePartsEmpty) {
  const std::vector<Shape> shapes = {{1, 100}};
  EXPECT_THAT(cut_rows(shapes, 4),
              ElementsAre(IsEmpty(), Shards{{0, {0, 1}}}, IsEmpty(), IsEmpty()));
}

TEST(CutRows, NothingToCut) {
  EXPECT_THAT(cut_rows({}, 3), ElementsAre(IsEmpty(), IsEmpty(), IsEmpty()));
  const std::vector<Shape> hollow = {{0, 5}, {3, 0}};
  EXPECT_THAT(cut_rows(hollow, 2), ElementsAre(IsEmpty(), IsEmpty()));
  EXPECT_THROW(cut_rows({}, 0), ConfigError);
  const std::vector<Shape> negative = {{2, -1}};
  EXPECT_THAT([&] { cut_rows(negative, 2); }, ThrowsMessage<ConfigError>(HasSubstr("(2, -1)")));
}

std::vector<Shape> random_shapes(std::mt19937& random) {
  const auto pick = [&](int low, int high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  std::vector<Shape> shapes(pick(0, 6));
  for (auto& shape : shapes) {
    shape.resize(pick(0, 3));
    for (auto& size : shape) size = pick(0, 9) == 0 ? 0 : pick(1, 8);
  }
  return shapes;
}

TEST(CutRows, EveryElementIsOwnedOnceAndSharesAreNearlyEqual) {
  std::mt19937 random(7);
  for (int round = 0; round < 2000; ++round) {
    const auto shapes = random_shapes(random);
    const int64_t parts = 1 + round % 9;
    int64_t total = 0, widest_row = 0;
    for (const auto& shape : shapes) {
      total += numel_of(shape);
      if (numel_of(shape) > 0 && !shape.empty()) {
        widest_row = std::max(widest_row, numel_of(shape) / shape[0]);
      }
    }
    // Shards of one tensor come in row order, and part after part: so they tile if each begins
    // where the last ended.
    std::vector<int64_t> next_row(shapes.size(), 0);
    std::pair<int64_t, int64_t> last{-1, 0};
    int64_t owned = 0, part = 0;
    for (const auto& shards : cut_rows(shapes, parts)) {
      for (const auto& [tensor, rows] : shards) {
        ASSERT_FALSE(rows.empty());
        ASSERT_EQ(rows.begin, next_row[tensor]);
        ASSERT_LT(last, (std::pair{tensor, rows.begin + 1}));
        last = {tensor, rows.begin + 1};
        next_row[tensor] = rows.end;
        const auto& shape = shapes[tensor];
        owned += shape.empty() ? 1 : numel_of(shape) / shape[0] * rows.size();
      }
      // A cut is at most half a row away from where it should be.
      const auto ideal = balanced_range(total, parts, part++).end;
      ASSERT_LE(2 * std::abs(owned - ideal), widest_row);
    }
    ASSERT_EQ(owned, total);
    for (size_t i = 0; i < shapes.size(); ++i) {
      const int64_t rows = shapes[i].empty() ? 1 : shapes[i][0];
      ASSERT_EQ(next_row[i], numel_of(shapes[i]) == 0 ? 0 : rows);
    }
  }
}

TEST(Factors, NearlySquare) {
  EXPECT_THAT(nearly_square(6), ElementsAre(3, 2));
  EXPECT_THAT(nearly_square(5), ElementsAre(5, 1));
  EXPECT_THAT(nearly_square(4), ElementsAre(2, 2));
  EXPECT_THAT(nearly_square(12), ElementsAre(4, 3));
  EXPECT_THAT(nearly_square(1), ElementsAre(1, 1));
  EXPECT_THAT([] { nearly_square(0); }, ThrowsMessage<ConfigError>(HasSubstr("[nearly_square] 0")));
}

TEST(Factors, NearlyCubic) {
  EXPECT_THAT(nearly_cubic(8), ElementsAre(2, 2, 2));
  EXPECT_THAT(nearly_cubic(12), ElementsAre(3, 2, 2));
  EXPECT_THAT(nearly_cubic(7), ElementsAre(7, 1, 1));
  EXPECT_THAT(nearly_cubic(1), ElementsAre(1, 1, 1));
  EXPECT_THAT(nearly_cubic(64), ElementsAre(4, 4, 4));
  EXPECT_THROW(nearly_cubic(-8), ConfigError);
}

TEST(Factors, ExactAndAsNearAsPossible) {
  for (int n = 1; n <= 500; ++n) {
    const auto [a, b] = nearly_square(n);
    ASSERT_EQ(a * b, n);
    ASSERT_GE(a, b);
    for (int x = b + 1; x * x <= n; ++x) ASSERT_NE(n % x, 0) << n;

    const auto [p, q, r] = nearly_cubic(n);
    ASSERT_EQ(p * q * r, n);
    ASSERT_GE(p, q);
    ASSERT_GE(q, r);
    for (int x = 1; x <= n; ++x) {
      for (int y = 1; n % x == 0 && y <= n / x; ++y) {
        if (n / x % y != 0) continue;
        ASSERT_LE(p + q + r, x + y + n / x / y) << n;
      }
    }
  }
}

}  // namespace
}  // namespace lockstep::layout
