// SPDX-License-Identifier: Apache-2.0
#include "lockstep/layout/placement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "lockstep/core/error.h"
#include "tests/support/refused.h"

namespace lockstep::layout {
namespace {

using test::refused;
using testing::ElementsAre;
using testing::IsEmpty;

TEST(PartitionMap, DealsOutOneAfterTheOther) {
  const PartitionMap map(7, 3);
  EXPECT_THAT(map.owned(0), ElementsAre(0, 3, 6));
  EXPECT_THAT(map.owned(1), ElementsAre(1, 4));
  EXPECT_THAT(map.owned(2), ElementsAre(2, 5));
  EXPECT_EQ(map.owner(5), 2);
  EXPECT_TRUE(map.owns(2, 5));
  EXPECT_FALSE(map.owns(1, 5));
  EXPECT_EQ(map.local_index(6), 2);
  EXPECT_EQ(map.global_index(1, 1), 4);
}

TEST(PartitionMap, TenPartitionsOverFourRanks) {
  const PartitionMap map(10, 4);
  EXPECT_EQ(map.owner(6), 2);
  EXPECT_EQ(map.local_index(6), 1);
  EXPECT_EQ(map.global_index(2, 1), 6);
  EXPECT_EQ(map.owned_count(1), 3);
  EXPECT_EQ(map.owned_count(2), 2);
  EXPECT_THAT(map.owned(1), ElementsAre(1, 5, 9));
}

TEST(PartitionMap, IndicesGoBothWaysAndEveryPartitionHasOneOwner) {
  for (int world = 1; world <= 24; ++world) {
    for (int64_t partitions = 0; partitions <= 50; ++partitions) {
      const PartitionMap map(partitions, world);
      std::vector<int> owners(static_cast<size_t>(partitions), 0);
      int64_t sum = 0;
      for (int rank = 0; rank < world; ++rank) {
        const auto owned = map.owned(rank);
        ASSERT_EQ(static_cast<int64_t>(owned.size()), map.owned_count(rank));
        sum += map.owned_count(rank);
        for (size_t local = 0; local < owned.size(); ++local) {
          const int64_t global = owned[local];
          ++owners[static_cast<size_t>(global)];
          EXPECT_EQ(map.owner(global), rank);
          EXPECT_EQ(map.local_index(global), static_cast<int64_t>(local));
          EXPECT_EQ(map.global_index(rank, static_cast<int64_t>(local)), global);
        }
        // No rank has more than one above another.
        EXPECT_LE(map.owned_count(0) - map.owned_count(rank), 1);
      }
      EXPECT_EQ(sum, partitions);
      EXPECT_THAT(owners, testing::Each(1));
    }
  }
}

TEST(PartitionMap, GroupOfSomeParameters) {
  const PartitionMap map(10, 4);
  const auto group = [&](std::vector<int64_t> partitions) { return map.group_of(partitions); };
  EXPECT_THAT(group({}), IsEmpty());
  EXPECT_THAT(group({7}), ElementsAre(3));
  EXPECT_THAT(group({9, 3, 1, 7, 5}), ElementsAre(1, 3));
  EXPECT_THAT(group({0, 1, 2, 3, 4}), ElementsAre(0, 1, 2, 3));
}

TEST(PartitionMap, RefusesWhatIsOutside) {
  EXPECT_THAT([] { PartitionMap(-1, 2); },
              refused("[partition_map] ... -1 partitions ... at least 0"));
  EXPECT_THAT([] { PartitionMap(3, 0); },
              refused("[partition_map] ... world size 0 ... at least 1"));
  const PartitionMap map(5, 2);
  const std::string rank = "[partition_map] ... rank 2 ... at least 0 ... world size 2";
  EXPECT_THAT([&] { map.owned_count(2); }, refused(rank));
  EXPECT_THAT([&] { map.owned(2); }, refused(rank));
  EXPECT_THAT([&] { map.owns(2, 0); }, refused(rank));
  EXPECT_THAT([&] { map.global_index(2, 0); }, refused(rank));
  EXPECT_THROW(map.owned(-1), ConfigError);
  EXPECT_THAT([&] { map.owned_count(-1); },
              refused("[partition_map] ... rank -1 ... at least 0 ... world size 2"));
  const std::string partition = "[partition_map] ... partition 5 ... at least 0 ... below 5";
  EXPECT_THAT([&] { map.owner(5); }, refused(partition));
  EXPECT_THAT([&] { map.local_index(5); }, refused(partition));
  EXPECT_THAT([&] { map.group_of(std::vector<int64_t>{0, 5}); }, refused(partition));
  EXPECT_THROW(map.local_index(-1), ConfigError);
  EXPECT_THAT([&] { map.owner(-1); },
              refused("[partition_map] ... partition -1 ... at least 0 ... below 5"));
  EXPECT_THAT([&] { map.global_index(1, 2); },
              refused("[partition_map] ... rank 1: local index 2 ... at least 0 ... below 2"));
  EXPECT_THAT([&] { map.global_index(1, -1); },
              refused("[partition_map] ... rank 1: local index -1 ... at least 0 ... below 2"));
}

}  // namespace
}  // namespace lockstep::layout
