// SPDX-License-Identifier: Apache-2.0
// What adaptive chooses by.
#include "lockstep/comm/strategy/table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "lockstep/core/error.h"
#include "tests/support/subprocess.h"

namespace lockstep::comm::strategy {
namespace {

using fabric::OpKind;
using layout::CommStrategy;

Table example() {
  Table table;
  table.add(OpKind::all_reduce, 1024, CommStrategy::tree);
  table.add(OpKind::all_reduce, 16384, CommStrategy::all_reduce);
  table.add(OpKind::all_reduce, 1 << 20, CommStrategy::ring);
  table.add(OpKind::broadcast, 1024, CommStrategy::tree);
  return table;
}

TEST(StrategyTable, TakesTheNearestSizeInProportion) {
  const Table table = example();
  EXPECT_EQ(table.choose(OpKind::all_reduce, 0), CommStrategy::tree);
  EXPECT_EQ(table.choose(OpKind::all_reduce, 4095), CommStrategy::tree);
  EXPECT_EQ(table.choose(OpKind::all_reduce, 4097), CommStrategy::all_reduce);
  EXPECT_EQ(table.choose(OpKind::all_reduce, 1 << 17), CommStrategy::ring);
  EXPECT_EQ(table.choose(OpKind::all_reduce, int64_t{1} << 40), CommStrategy::ring);
  EXPECT_EQ(table.choose(OpKind::broadcast, 1 << 30), CommStrategy::tree);
  EXPECT_EQ(table.choose(OpKind::all_gather, 1024), CommStrategy::all_reduce);
  EXPECT_THAT(table.strategies(), testing::ElementsAre(CommStrategy::ring, CommStrategy::tree));
  EXPECT_EQ(Table::always(CommStrategy::ring).choose(OpKind::all_gather, 1), CommStrategy::ring);
}

TEST(StrategyTable, ReadsWhatItWrites) {
  EXPECT_EQ(Table::from_json(example().to_json()), example());
  for (const char* text :
       {"", "[", "{\"all_reduce\": 3}", "{\"all_reduce\": [[1024]]}", "{\"dance\": []}",
        "{\"all_reduce\": [[0, \"ring\"]]}", "{\"all_reduce\": [[8, \"adaptive\"]]}",
        "{\"all_reduce\": [[8, \"star\"]]}", "{\"all_reduce\": [[\"8\", \"ring\"]]}"}) {
    EXPECT_THROW(Table::from_json(text), ConfigError) << text;
  }
}

TEST(StrategyTable, AFileKeepsTheTablesOfOtherLayouts) {
  const lockstep::test::TempDir folder;
  const std::string path = folder.path() + "/deep/collectives.json";
  Table other;
  other.add(OpKind::all_gather, 8, CommStrategy::ring);
  lockstep::test::write_file(folder.path() + "/file", "");
  save_table(path, "gloo 2+2", example());
  save_table(path, "shm 4", other);
  save_table(path, "gloo 2+2", other);
  const std::string text = lockstep::test::read_file(path);
  EXPECT_THAT(text, testing::HasSubstr("gloo 2+2"));
  EXPECT_THAT(text, testing::HasSubstr("shm 4"));
  EXPECT_THAT(text, testing::Not(testing::HasSubstr("tree")));
  // What cannot be read is replaced.
  lockstep::test::write_file(path, "{\"format\": 1, \"tables\": {}");
  save_table(path, "shm 2", other);
  EXPECT_THAT(lockstep::test::read_file(path), testing::Not(testing::HasSubstr("shm 4")));
}

}  // namespace
}  // namespace lockstep::comm::strategy
