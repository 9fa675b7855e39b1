// SPDX-License-Identifier: Apache-2.0
#include "lockstep/layout/rank_map.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <set>

#include "lockstep/core/error.h"
#include "tests/support/says.h"

namespace lockstep::layout {
namespace {

using test::says;
using testing::ElementsAre;
using testing::StrEq;
using testing::ThrowsMessage;

constexpr Axis kAxes[] = {Axis::dp, Axis::tp, Axis::pp};

constexpr Order kOrders[] = {Order::pp_fastest, Order::tp_fastest, Order::dp_pp_tp,
                             Order::tp_dp_pp,   Order::tp_pp_dp,   Order::pp_tp_dp};

// Every factorisation of every world size up to 24, in all orders.
void for_every_map(const std::function<void(const RankMap&)>& body) {
  for (int world = 1; world <= 24; ++world) {
    for (int dp = 1; dp <= world; ++dp) {
      for (int tp = 1; world % dp == 0 && tp <= world / dp; ++tp) {
        if (world / dp % tp != 0) continue;
        for (const auto order : kOrders) {
          const RankMap map({dp, tp, world / dp / tp}, order);
          SCOPED_TRACE(map.dims().describe() + " " + std::string(name_of(order)));
          ASSERT_EQ(map.world_size(), world);
          body(map);
        }
      }
    }
  }
}

TEST(RankMap, PipelineFastestFormula) {
  for_every_map([](const RankMap& map) {
    if (map.order() != Order::pp_fastest) return;
    const auto [dp, tp, pp] = map.dims();
    for (int r = 0; r < map.world_size(); ++r) {
      EXPECT_EQ(map.coordinate_of(r), (Coordinate{r / (pp * tp), r / pp % tp, r % pp}));
    }
  });
}

TEST(RankMap, TensorFastestFormula) {
  for_every_map([](const RankMap& map) {
    if (map.order() != Order::tp_fastest) return;
    const auto [dp, tp, pp] = map.dims();
    for (int r = 0; r < map.world_size(); ++r) {
      EXPECT_EQ(map.coordinate_of(r), (Coordinate{r / tp % dp, r % tp, r / (tp * dp)}));
    }
  });
}

TEST(RankMap, CoordinatesAndBack) {
  for_every_map([](const RankMap& map) {
    for (int r = 0; r < map.world_size(); ++r) EXPECT_EQ(map.rank_at(map.coordinate_of(r)), r);
  });
}

TEST(RankMap, GroupsTileTheWorld) {
  for_every_map([](const RankMap& map) {
    for (const auto axis : kAxes) {
      std::set<int> seen;
      std::set<std::string> ids;
      for (const auto& group : map.groups(axis)) {
        ASSERT_EQ(static_cast<int>(group.size()), map.size(axis));
        ids.insert(map.group_id(axis, group[0]));
        for (int i = 0; i < map.size(axis); ++i) {
          EXPECT_TRUE(seen.insert(group[i]).second);
          EXPECT_EQ(map.group(axis, group[i]), group);
          EXPECT_EQ(map.group_id(axis, group[i]), map.group_id(axis, group[0]));
          EXPECT_EQ(map.coordinate_of(group[i]).at(axis), i);
          EXPECT_EQ(map.is_head(axis, group[i]), i == 0);
          EXPECT_EQ(map.is_tail(axis, group[i]), i == map.size(axis) - 1);
          for (const auto other : kAxes) {
            if (other == axis) continue;
            EXPECT_EQ(map.coordinate_of(group[i]).at(other), map.coordinate_of(group[0]).at(other));
          }
        }
      }
      EXPECT_EQ(static_cast<int>(seen.size()), map.world_size());
      EXPECT_EQ(ids.size(), map.groups(axis).size()) << "group ids must differ";
    }
  });
}

TEST(RankMap, NeighbouringStages) {
  for_every_map([](const RankMap& map) {
    for (int r = 0; r < map.world_size(); ++r) {
      const auto stages = map.group(Axis::pp, r);
      const auto at = map.coordinate_of(r).pp;
      const auto pp = map.dims().pp;
      EXPECT_EQ(map.next_stage_wrapped(r), stages[(at + 1) % pp]);
      EXPECT_EQ(map.previous_stage_wrapped(r), stages[(at + pp - 1) % pp]);
      if (map.is_pipeline_tail(r)) {
        EXPECT_EQ(map.next_stage(r), std::nullopt);
      } else {
        EXPECT_EQ(map.next_stage(r), stages[at + 1]);
      }
      if (map.is_pipeline_head(r)) {
        EXPECT_EQ(map.previous_stage(r), std::nullopt);
      } else {
        EXPECT_EQ(map.previous_stage(r), stages[at - 1]);
      }
    }
  });
}

TEST(RankMap, TwoByTwoByTwoByHand) {
  const RankMap map({2, 2, 2});
  EXPECT_EQ(map.coordinate_of(5), (Coordinate{.dp = 1, .tp = 0, .pp = 1}));
  EXPECT_THAT(map.group(Axis::dp, 5), ElementsAre(1, 5));
  EXPECT_THAT(map.group(Axis::tp, 5), ElementsAre(5, 7));
  EXPECT_THAT(map.group(Axis::pp, 5), ElementsAre(4, 5));
  EXPECT_EQ(map.group_id(Axis::dp, 5), "dp_group_tp0_pp1");
  EXPECT_EQ(map.group_id(Axis::tp, 5), "tp_group_dp1_pp1");
  EXPECT_EQ(map.group_id(Axis::pp, 5), "pp_group_dp1_tp0");
  EXPECT_THAT(map.groups(Axis::tp), ElementsAre(ElementsAre(0, 2), ElementsAre(1, 3),
                                                ElementsAre(4, 6), ElementsAre(5, 7)));
  EXPECT_EQ(map.next_stage(4), 5);
  EXPECT_EQ(map.next_stage(5), std::nullopt);
  EXPECT_EQ(map.next_stage_wrapped(5), 4);
}

// Megatron's own example of 16 ranks: tp 2, pp 4, dp 2.
TEST(RankMap, MegatronExample) {
  const RankMap map({.dp = 2, .tp = 2, .pp = 4}, Order::tp_fastest);
  EXPECT_THAT(map.group(Axis::tp, 0), ElementsAre(0, 1));
  EXPECT_THAT(map.group(Axis::dp, 0), ElementsAre(0, 2));
  EXPECT_THAT(map.group(Axis::dp, 5), ElementsAre(5, 7));
  EXPECT_THAT(map.group(Axis::pp, 0), ElementsAre(0, 4, 8, 12));
  EXPECT_THAT(map.group(Axis::pp, 3), ElementsAre(3, 7, 11, 15));
}

// The name of a permutation says what its map does: the last axis is fastest.
TEST(RankMap, APermutationHasTheSlowestAxisFirst) {
  const ParallelDims dims{.dp = 2, .tp = 3, .pp = 5};
  for (const char* name :
       {"dp-tp-pp", "pp-dp-tp", "dp-pp-tp", "tp-dp-pp", "tp-pp-dp", "pp-tp-dp"}) {
    const RankMap map(dims, parse_order(name));
    int stride = 1;
    for (const size_t at : {6, 3, 0}) {
      const Axis axis = name[at] == 'd' ? Axis::dp : name[at] == 't' ? Axis::tp : Axis::pp;
      EXPECT_EQ(map.group(axis, 0).at(1), stride) << name;
      stride *= map.size(axis);
    }
  }
}

TEST(RankMap, GroupsAreListedByCoordinate) {
  const RankMap map({.dp = 2, .tp = 1, .pp = 2}, Order::tp_fastest);
  std::vector<std::string> ids;
  for (const auto& group : map.named_groups()) {
    ids.push_back(group.id);
    EXPECT_EQ(group.members.front(), map.rank_at(group.first));
    for (const int rank : group.members) EXPECT_EQ(map.group_id(group.axis, rank), group.id);
  }
  EXPECT_THAT(ids, ElementsAre("dp_group_tp0_pp0", "dp_group_tp0_pp1", "tp_group_dp0_pp0",
                               "tp_group_dp1_pp0", "tp_group_dp0_pp1", "tp_group_dp1_pp1",
                               "pp_group_dp0_tp0", "pp_group_dp1_tp0"));
}

TEST(RankMap, OutsideIsAnError) {
  const RankMap map({2, 2, 3});
  EXPECT_THAT(
      [&] { map.coordinate_of(12); },
      ThrowsMessage<ConfigError>(says(
          "[rank_map] ... rank 12 is outside dp 2 x tp 2 x pp 3 ... at least 0 ... below 12")));
  EXPECT_THROW(map.coordinate_of(-1), ConfigError);
  EXPECT_THROW(map.group(Axis::dp, 12), ConfigError);
  EXPECT_THAT(
      [&] {
        map.rank_at({0, 2, 1});
      },
      ThrowsMessage<ConfigError>(StrEq("[rank_map] coordinate (dp 0, tp 2, pp 1) is "
                                       "outside dp 2 x tp 2 x pp 3")));
  EXPECT_THROW(map.rank_at({0, 0, -1}), ConfigError);
  EXPECT_THROW(map.rank_at({2, 0, 0}), ConfigError);
  EXPECT_THROW(RankMap({0, 1, 1}), ConfigError);
  EXPECT_THROW(RankMap({1 << 20, 1 << 20, 1}), ConfigError);
}

TEST(RankMap, Names) {
  EXPECT_EQ(name_of(Order::pp_fastest), "pp_fastest");
  EXPECT_EQ(name_of(Order::tp_fastest), "tp_fastest");
  for (const Order order : kOrders) EXPECT_EQ(parse_order(name_of(order)), order);
  EXPECT_EQ(parse_order("dp-tp-pp"), Order::pp_fastest);
  EXPECT_EQ(parse_order("pp-dp-tp"), Order::tp_fastest);
  EXPECT_THROW(parse_order("dp-tp"), ConfigError);
  EXPECT_THROW(parse_order("dp-dp-tp"), ConfigError);
  EXPECT_EQ(name_of(Axis::tp), "tp");
}

}  // namespace
}  // namespace lockstep::layout
