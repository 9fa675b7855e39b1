// SPDX-License-Identifier: Apache-2.0
#include "lockstep/layout/flat_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <stdexcept>

namespace lockstep::layout {
namespace {

using testing::ElementsAre;

TEST(FlatLayout, OneTensorInBalancedParts) {
  const std::vector<Shape> shapes{{10}};
  const FlatLayout layout = lay_out(shapes, 4, 1);
  EXPECT_EQ(layout.size, 10);
  EXPECT_THAT(layout.counts(), ElementsAre(3, 3, 2, 2));
  EXPECT_THAT(layout.blocks, ElementsAre(Range{0, 3}, Range{3, 6}, Range{6, 8}, Range{8, 10}));
  EXPECT_THAT(layout.rows[2], ElementsAre(RowShard{0, {6, 8}}));
}

TEST(FlatLayout, TheLastPartHasThePadding) {
  const std::vector<Shape> shapes{{10}};
  const FlatLayout layout = lay_out(shapes, 4, 16);
  EXPECT_EQ(layout.size, 16);
  EXPECT_THAT(layout.counts(), ElementsAre(3, 3, 2, 8));
}

TEST(FlatLayout, PaddingBelongsToWhatIsBeforeIt) {
  const std::vector<Shape> shapes{{6}, {6}};
  const FlatLayout layout = lay_out(shapes, 2, 8);
  EXPECT_THAT(layout.offsets, ElementsAre(0, 8));
  EXPECT_THAT(layout.blocks, ElementsAre(Range{0, 8}, Range{8, 16}));
  EXPECT_THAT(layout.rows[0], ElementsAre(RowShard{0, {0, 6}}));
  EXPECT_THAT(layout.rows[1], ElementsAre(RowShard{1, {0, 6}}));
}

TEST(FlatLayout, CutsAreBetweenRows) {
  const std::vector<Shape> shapes{{5, 4}, {3}};
  const FlatLayout layout = lay_out(shapes, 2, 1);
  // 23 elements: the cut at 12 is one.
  EXPECT_THAT(layout.blocks, ElementsAre(Range{0, 12}, Range{12, 23}));
  EXPECT_THAT(layout.rows[1], ElementsAre(RowShard{0, {3, 5}}, RowShard{1, {0, 3}}));
}

TEST(FlatLayout, PartsWithoutRowsAreEmpty) {
  const std::vector<Shape> shapes{{1, 100}, {}};
  const FlatLayout layout = lay_out(shapes, 4, 16);
  EXPECT_EQ(layout.size, 128);
  int64_t next = 0;
  for (size_t part = 0; part < 4; ++part) {
    EXPECT_EQ(layout.blocks[part].begin, next);
    EXPECT_EQ(layout.blocks[part].size() == 0, layout.rows[part].empty());
    next = layout.blocks[part].end;
  }
  EXPECT_EQ(next, layout.size);
}

TEST(FlatLayout, NothingToLayOut) {
  const FlatLayout layout = lay_out({}, 3, 16);
  EXPECT_EQ(layout.size, 0);
  EXPECT_THAT(layout.counts(), ElementsAre(0, 0, 0));
  const std::vector<Shape> empty{{0, 4}, {3, 0}};
  EXPECT_EQ(lay_out(empty, 2, 16).size, 0);
}

// Of all places in the line each belongs to one block, and each element of a tensor to the part
// that has its row.
TEST(FlatLayout, EveryElementIsOwnedOnce) {
  std::mt19937 random(1);  // NOLINT(cert-msc51-cpp)
  const auto below = [&](int64_t limit) { return static_cast<int64_t>(random() % limit); };
  for (int round = 0; round < 300; ++round) {
    std::vector<Shape> shapes(1 + below(5));
    for (Shape& shape : shapes) {
      shape.resize(below(4));
      for (int64_t& size : shape) size = below(8) == 0 ? 0 : 1 + below(9);
    }
    const int64_t parts = 1 + below(9), alignment = int64_t{1} << below(6);
    const FlatLayout layout = lay_out(shapes, parts, alignment);
    ASSERT_EQ(layout.offsets.size(), shapes.size());
    std::vector<int> owner(static_cast<size_t>(layout.size), -1);
    ASSERT_EQ(layout.blocks.size(), static_cast<size_t>(parts));
    for (int part = 0; part < parts; ++part) {
      const Range block = layout.blocks[static_cast<size_t>(part)];
      for (int64_t i = block.begin; i < block.end; ++i) {
        ASSERT_EQ(owner.at(static_cast<size_t>(i)), -1);
        owner[static_cast<size_t>(i)] = part;
      }
    }
    ASSERT_THAT(owner, testing::Each(testing::Ge(0)));
    std::vector<int> used(owner.size(), 0);
    int64_t total = 0;
    for (int part = 0; part < parts; ++part) {
      for (const RowShard& shard : layout.rows[static_cast<size_t>(part)]) {
        const Shape& shape = shapes[static_cast<size_t>(shard.tensor)];
        const int64_t row_size = shape.empty() ? 1 : numel_of(shape) / shape[0];
        const int64_t first = layout.offsets[static_cast<size_t>(shard.tensor)];
        for (int64_t i = shard.rows.begin * row_size; i < shard.rows.end * row_size; ++i) {
          ASSERT_EQ(owner.at(static_cast<size_t>(first + i)), part);
          ++used[static_cast<size_t>(first + i)];
          ++total;
        }
      }
    }
    int64_t expected = 0;
    for (size_t i = 0; i < shapes.size(); ++i) {
      ASSERT_EQ(layout.offsets[i] % alignment, 0);
      expected += numel_of(shapes[i]);
    }
    ASSERT_EQ(total, expected);
    ASSERT_THAT(used, testing::Each(testing::Le(1)));
    ASSERT_LT(layout.size - expected, static_cast<int64_t>(shapes.size()) * alignment);
  }
}

TEST(FlatLayout, WholeTensorsLieByOwner) {
  const std::vector<Shape> shapes{{6}, {2, 5}, {}, {3, 0}, {4}};
  const std::vector<int> owners{0, 0, 2, 2, 3};
  const FlatLayout layout = lay_out(shapes, owners, 5, 8);
  EXPECT_THAT(layout.offsets, ElementsAre(0, 8, 24, 32, 32));
  EXPECT_THAT(layout.blocks, ElementsAre(Range{0, 24}, Range{24, 24}, Range{24, 32}, Range{32, 40},
                                         Range{40, 40}));
  EXPECT_THAT(layout.rows[0], ElementsAre(RowShard{0, {0, 6}}, RowShard{1, {0, 2}}));
  EXPECT_THAT(layout.rows[1], ElementsAre());
  EXPECT_THAT(layout.rows[2], ElementsAre(RowShard{2, {0, 1}}));
  EXPECT_THAT(layout.rows[3], ElementsAre(RowShard{4, {0, 4}}));
  EXPECT_EQ(layout.size, 40);
  // Without owners, rows.
  EXPECT_THAT(lay_out(shapes, {}, 2, 1).counts(), lay_out(shapes, 2, 1).counts());
  for (const std::vector<int>& wrong : {std::vector<int>{0, 0, 2, 1, 3}, {0, 1}, {0, 0, 0, 0, 5}})
    EXPECT_THROW(lay_out(shapes, wrong, 5, 8), std::logic_error) << wrong.size();
}

TEST(FlatLayout, TensorsOfAnOwnerKeepTheirOrder) {
  const std::vector<int> owners{1, kEveryRank, 0, 1, 0};
  EXPECT_THAT(order_of_tensors(5, owners), ElementsAre(1, 2, 4, 0, 3));
  EXPECT_THAT(order_of_tensors(3, {}), ElementsAre(0, 1, 2));
}

TEST(OwnersOfTensors, AreDealtOutInTurn) {
  const std::vector<DealtTensor> tensors{{100}, {5}, {100}, {100, false}, {100}, {200, false}};
  const Deal deal{.world = 3, .min_elements = 10};
  // The small one takes no turn, and frozen ones are counted by themselves.
  EXPECT_THAT(owners_of_tensors(tensors, deal), ElementsAre(0, kEveryRank, 1, 0, 2, 1));
  EXPECT_THAT(owners_of_tensors(tensors, {.world = 1, .min_elements = 10}),
              ElementsAre(0, kEveryRank, 0, 0, 0, 0));
  EXPECT_THAT(owners_of_tensors({}, deal), ElementsAre());
}

// A tied tensor has one owner, wherever it is in a stage, and whether or not the others are there.
TEST(OwnersOfTensors, ReservedIndicesAreTheSameInEveryStage) {
  const Deal deal{.world = 4, .min_elements = 10, .reserved = 2};
  const std::vector<DealtTensor> first{{50, true, 0}, {50}, {50, true, 1}, {50}},
      last{{50}, {50}, {50}, {50, true, 1}};
  EXPECT_THAT(owners_of_tensors(first, deal), ElementsAre(0, 2, 1, 3));
  EXPECT_THAT(owners_of_tensors(last, deal), ElementsAre(2, 3, 0, 1));
}

}  // namespace
}  // namespace lockstep::layout
