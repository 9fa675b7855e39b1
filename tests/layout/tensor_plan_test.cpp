// SPDX-License-Identifier: Apache-2.0
#include "lockstep/layout/tensor_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/core/error.h"
#include "tests/support/says.h"

namespace lockstep::layout {
namespace {

using test::says;
using testing::ElementsAre;

template <class Function>
std::string message_of(const Function& function) {
  try {
    function();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

TEST(TensorPlan, FindsTheRuleOfAModule) {
  const TensorPlan plan{{"blocks.*.up", TensorStyle::column}, {"head", TensorStyle::vocab}};
  const std::vector<std::string> modules{"",     "blocks.0.up", "blocks.11.up", "blocks.0.down",
                                         "head", "heads"};
  EXPECT_THAT(match(plan, modules), ElementsAre(-1, 0, 0, -1, 1, -1));
}

TEST(TensorPlan, AModuleHasOneRule) {
  const TensorPlan plan{{"*.up", TensorStyle::column}, {"blocks.*", TensorStyle::sequence}};
  EXPECT_THAT(message_of([&] { match(plan, std::vector<std::string>{"blocks.0.up"}); }),
              says("[tensor] ... module 'blocks.0.up' ... '*.up' ... 'blocks.*' ... once"));
  EXPECT_THAT(message_of([&] {
                require_all_used(plan, {true, false});
              }),
              says("[tensor] ... 'blocks.*' ... no module"));
  require_all_used(plan, {true, true});
}

// 6 query heads, 2 key and 2 value heads of width 3, over 2 ranks.
TEST(TensorPlan, FusedPartsAreSharedOneByOne) {
  const TensorRule rule{"qkv", TensorStyle::column, {6, 2, 2}};
  const TensorSplit second = split_of(rule, "qkv", "weight", {30, 5}, 2, 1);
  EXPECT_EQ(second.dim, 0);
  EXPECT_THAT(second.ranges, ElementsAre(Range{9, 18}, Range{21, 24}, Range{27, 30}));
  EXPECT_EQ(second.local_shape(), (Shape{15, 5}));
  EXPECT_EQ(split_of(rule, "qkv", "bias", {30}, 2, 0).local_shape(), (Shape{15}));
  EXPECT_THAT(message_of([&] {
                split_of(rule, "qkv", "weight", {30, 5}, 4, 0);
              }),
              says("[tensor] ... 'qkv' ((30, 5)) ... part of 6 ... divisible by 4 ranks"));
}

TEST(TensorPlan, RowsKeepTheirBiasWhole) {
  const TensorRule rule{"down", TensorStyle::row};
  EXPECT_THAT(split_of(rule, "down", "weight", {5, 8}, 4, 2).ranges, ElementsAre(Range{4, 6}));
  EXPECT_EQ(split_of(rule, "down", "weight", {5, 8}, 4, 2).local_shape(), (Shape{5, 2}));
  EXPECT_TRUE(split_of(rule, "down", "bias", {5}, 4, 2).is_whole());
  EXPECT_TRUE(split_of({"n", TensorStyle::sequence}, "n", "weight", {5}, 4, 2).is_whole());
}

TEST(TensorPlan, AVocabularyNeedNotDivide) {
  const TensorRule rule{"embed", TensorStyle::vocab};
  EXPECT_THAT(split_of(rule, "embed", "weight", {10, 2}, 4, 1).ranges, ElementsAre(Range{3, 6}));
  EXPECT_THAT(split_of(rule, "embed", "weight", {10, 2}, 4, 3).ranges, ElementsAre(Range{8, 10}));
}

// A shard of a rank's rows, which go over the border between two parts.
TEST(TensorPlan, PiecesAreBoxesOfTheWhole) {
  const TensorSplit split{{12, 4}, 0, {{0, 3}, {6, 9}}};
  const auto pieces = split.pieces({{{2, 5}, {1, 4}}});
  ASSERT_EQ(pieces.size(), 2u);
  EXPECT_EQ(pieces[0].local, (Box{{{2, 3}, {1, 4}}}));
  EXPECT_EQ(pieces[0].global, (Box{{{2, 3}, {1, 4}}}));
  EXPECT_EQ(pieces[1].local, (Box{{{3, 5}, {1, 4}}}));
  EXPECT_EQ(pieces[1].global, (Box{{{6, 8}, {1, 4}}}));
  const TensorSplit whole{{12, 4}};
  EXPECT_EQ(whole.pieces({{{2, 5}, {1, 4}}})[0].global, (Box{{{2, 5}, {1, 4}}}));
}

}  // namespace
}  // namespace lockstep::layout
