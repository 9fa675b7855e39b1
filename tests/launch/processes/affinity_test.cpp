// SPDX-License-Identifier: Apache-2.0
// Which cores are neighbours: on machines that hwloc is told of, not this one.
#include "lockstep/launch/processes/affinity.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <thread>

#include "lockstep/core/error.h"

namespace lockstep::launch {
namespace {

using Cores = std::vector<int>;

// hwloc believes this while it lives.
class Machine {
 public:
  explicit Machine(const char* description) { setenv("HWLOC_SYNTHETIC", description, 1); }
  ~Machine() { unsetenv("HWLOC_SYNTHETIC"); }
};

TEST(Affinity, CoresOfANodeStayTogetherHoweverTheKernelNumbersThem) {
  const Machine two_sockets("numa:2 core:3 pu:1(indexes=0,2,4,1,3,5)");  // even ones, odd ones
  const Cores ordered = in_machine_order({0, 1, 2, 3, 4, 5});
  EXPECT_EQ(ordered, (Cores{0, 2, 4, 1, 3, 5}));
  EXPECT_EQ(core_share(ordered, 0, 2), (Cores{0, 2, 4}));
  EXPECT_EQ(core_share(ordered, 1, 2), (Cores{1, 3, 5}));
}

TEST(Affinity, ThreadsOfACoreStayTogether) {
  const Machine hyperthreads("numa:2 core:2 pu:2(indexes=0,4,1,5,2,6,3,7)");
  const Cores ordered = in_machine_order({0, 1, 2, 3, 4, 5, 6, 7});
  EXPECT_EQ(ordered, (Cores{0, 4, 1, 5, 2, 6, 3, 7}));
  EXPECT_EQ(core_share(ordered, 1, 4), (Cores{1, 5}));
}

TEST(Affinity, OnlyCoresThatMayBeUsedAndAllOfThem) {
  const Machine two_sockets("numa:2 core:2 pu:1(indexes=0,2,1,3)");
  EXPECT_EQ(in_machine_order({1, 2, 3}), (Cores{2, 1, 3}));
  EXPECT_EQ(in_machine_order({9, 0}), (Cores{0, 9}));  // hwloc has not heard of 9
}

TEST(Affinity, RanksOfOneMaskDivideItAndBoundOnesHaveTheirOwn) {
  EXPECT_DOUBLE_EQ(cores_per_mask({{0, 1, 2, 3}}, 0), 4);
  EXPECT_DOUBLE_EQ(cores_per_mask({{0, 1, 2, 3}, {0, 1, 2, 3}}, 1), 2);
  EXPECT_DOUBLE_EQ(cores_per_mask({{0, 1}, {2, 3, 4}}, 0), 2);
  EXPECT_DOUBLE_EQ(cores_per_mask({{0, 1}, {2, 3, 4}}, 1), 3);
  EXPECT_DOUBLE_EQ(cores_per_mask({{0}, {0}, {0}}, 2), 1.0 / 3);
  // Two of one socket, one that may run anywhere.
  const std::vector<Cores> masks{{0, 1}, {0, 1}, {0, 1, 2, 3}};
  EXPECT_DOUBLE_EQ(cores_per_mask(masks, 0), 2.0 / 3);
  EXPECT_DOUBLE_EQ(cores_per_mask(masks, 2), 2 + 2.0 / 3);
}

TEST(Affinity, TheMaskIsWhatTheKernelSays) {
  Cores mask = affinity_mask(), ordered = allowed_cores();
  EXPECT_FALSE(mask.empty());
  std::sort(ordered.begin(), ordered.end());
  EXPECT_EQ(mask, ordered);
}

// A thread, so that the other tests keep their cores.
TEST(Affinity, AThreadIsBoundAndThoseItStarts) {
  const std::vector<int> last{affinity_mask().back()};
  std::vector<int> seen, seen_below;
  std::thread([&] {
    set_affinity(last);
    seen = affinity_mask();
    std::thread([&] { seen_below = affinity_mask(); }).join();
  }).join();
  EXPECT_EQ(seen, last);
  EXPECT_EQ(seen_below, last);
  EXPECT_THROW(set_affinity({}), ConfigError);
}

}  // namespace
}  // namespace lockstep::launch
