// SPDX-License-Identifier: Apache-2.0
#include "lockstep/layout/placement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "lockstep/core/error.h"
#include "lockstep/layout/shard_math.h"
#include "tests/support/says.h"

namespace lockstep::layout {
namespace {

using test::says;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::ThrowsMessage;

TEST(Placement, Whole) {
  const auto placement = Placement::whole("head.weight", {8, 4}, {"dp", "tp"});
  EXPECT_NO_THROW(placement.validate());
  EXPECT_TRUE(placement.is_whole());
  EXPECT_FALSE(placement.is_empty());
  EXPECT_EQ(placement.numel(), 32);
  EXPECT_THAT(placement.local_shape(), ElementsAre(8, 4));
  EXPECT_EQ(placement.describe(), "head.weight (8, 4) whole replicated over dp, tp");
}

TEST(Placement, NarrowMovesTheAxis) {
  const auto whole = Placement::whole("w", {8, 4}, {"dp", "tp"});
  const auto columns = whole.narrow(1, {2, 4}, "tp");
  EXPECT_EQ(columns, (Placement{.name = "w",
                                .global_shape = {8, 4},
                                .slice = {{{0, 8}, {2, 4}}},
                                .replicated_over = {"dp"},
                                .sharded_over = {"tp"}}));
  EXPECT_THAT(columns.local_shape(), ElementsAre(8, 2));
  EXPECT_FALSE(columns.is_whole());
  EXPECT_EQ(columns.describe(), "w (8, 4) [0:8, 2:4] sharded over tp, replicated over dp");

  // Indices of a second cut count from the first one's slice.
  const auto corner = columns.narrow(1, {1, 2}, "dp");
  EXPECT_EQ(corner.slice, (Box{{{0, 8}, {3, 4}}}));
  EXPECT_THAT(corner.sharded_over, ElementsAre("tp", "dp"));
  EXPECT_THAT(corner.replicated_over, IsEmpty());
}

TEST(Placement, ScalarsCanBeHeldOrNot) {
  const auto scalar = Placement::whole("scale", {}, {"dp"});
  EXPECT_TRUE(scalar.is_whole());
  EXPECT_EQ(scalar.numel(), 1);
  EXPECT_THAT(scalar.local_shape(), IsEmpty());
  const auto elsewhere = scalar.narrow(0, {0, 0}, "dp");
  EXPECT_TRUE(elsewhere.is_empty());
  EXPECT_FALSE(elsewhere.is_whole());
  EXPECT_THAT(elsewhere.local_shape(), ElementsAre(0));
}

TEST(Placement, EmptySlice) {
  const auto late = Placement::whole("w", {5, 3}).narrow(0, ceiling_chunk(5, 4, 3), "tp");
  EXPECT_TRUE(late.is_empty());
  EXPECT_THAT(late.local_shape(), ElementsAre(0, 3));
}

// Columns over tp by ceiling chunks, then rows over dp: the slices tile the tensor.
TEST(Placement, TwoCutsTile) {
  for (int64_t rows = 0; rows <= 7; ++rows) {
    for (int64_t tp = 1; tp <= 4; ++tp) {
      for (int64_t dp = 1; dp <= 4; ++dp) {
        const auto whole = Placement::whole("w", {rows, 5}, {"dp", "tp"});
        std::multiset<std::pair<int64_t, int64_t>> seen;
        for (int64_t t = 0; t < tp; ++t) {
          const auto columns = whole.narrow(1, ceiling_chunk(5, tp, t), "tp");
          for (int64_t d = 0; d < dp; ++d) {
            const auto part = columns.narrow(0, balanced_range(rows, dp, d), "dp");
            const auto& [r, c] = std::tie(part.slice.ranges[0], part.slice.ranges[1]);
            for (auto i = r.begin; i < r.end; ++i) {
              for (auto j = c.begin; j < c.end; ++j) seen.insert({i, j});
            }
          }
        }
        ASSERT_EQ(static_cast<int64_t>(seen.size()), rows * 5);
        ASSERT_EQ(std::set(seen.begin(), seen.end()).size(), seen.size());
      }
    }
  }
}

TEST(Placement, RejectsSlicesOutsideTheShape) {
  const auto refused = [](const Placement& placement, const char* rule) {
    EXPECT_THAT([&] { placement.validate(); }, ThrowsMessage<ConfigError>(says(rule)));
  };
  refused({.name = "", .global_shape = {2}, .slice = {{{0, 2}}}}, "the tensor ... a name");
  refused({.name = "w", .global_shape = {-2}, .slice = {{{0, 2}}}}, "sizes ... at least 0");
  refused({.name = "w", .global_shape = {2, 2}, .slice = {{{0, 2}}}},
          "the slice has 1 dimensions, must have 2");
  refused({.name = "w", .global_shape = {2}, .slice = {{{0, 3}}}}, "0:3 of dim 0 must lie in 0:2");
  refused({.name = "w", .global_shape = {2}, .slice = {{{2, 1}}}}, "2:1 of dim 0 must lie in 0:2");
  refused({.name = "w",
           .global_shape = {2},
           .slice = {{{0, 2}}},
           .replicated_over = {"dp"},
           .sharded_over = {"dp"}},
          "axis dp ... twice");
  refused({.name = "w", .global_shape = {2}, .slice = {{{0, 2}}}, .replicated_over = {""}},
          "axis ... no name");

  const auto whole = Placement::whole("w", {8, 4}, {"dp"});
  EXPECT_THAT(
      [&] {
        whole.narrow(2, {0, 1}, "dp");
      },
      ThrowsMessage<ConfigError>(says("dim 2 ... at least 0 ... below 2")));
  EXPECT_THAT(
      [&] {
        whole.narrow(0, {4, 9}, "dp");
      },
      ThrowsMessage<ConfigError>(HasSubstr("4:9 of dim 0 is outside its 0:8")));
  const auto half = whole.narrow(0, {0, 4}, "dp");
  EXPECT_THAT(
      [&] {
        half.narrow(0, {0, 2}, "dp");
      },
      ThrowsMessage<ConfigError>(says("axis dp ... twice")));
}

}  // namespace
}  // namespace lockstep::layout
