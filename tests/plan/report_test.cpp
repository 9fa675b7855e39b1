// SPDX-License-Identifier: Apache-2.0
#include "lockstep/plan/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace lockstep::plan {
namespace {

using testing::EndsWith;

TEST(Report, RanksWithEqualNumbersShareALine) {
  const Memory a{.parameters = 1, .gradients = 2, .optimizer = 3, .activations = 4, .buffers = 5};
  const Memory b{.parameters = 2048};
  EXPECT_EQ(to_table(std::vector{a, a, b, a}),
            "ranks   parameters  gradients  optimizer  activations  buffers  total\n"
            "0-1, 3         1 B        2 B        3 B          4 B      5 B   15 B\n"
            "2             2 kB        0 B        0 B          0 B      0 B   2 kB\n");
}

// Shards that are cut at rows differ by a little.
TEST(Report, RanksThatAreAlikeShareALineWithTheLargest) {
  const auto of = [](int64_t bytes) { return Memory{.parameters = bytes}; };
  EXPECT_EQ(to_table(std::vector{of(10000), of(10080), of(9000)}),
            "ranks  parameters  gradients  optimizer  activations  buffers    total\n"
            "0-1       9.84 kB        0 B        0 B          0 B      0 B  9.84 kB\n"
            "2         8.79 kB        0 B        0 B          0 B      0 B  8.79 kB\n");
}

TEST(Report, LineOfTheRankWithMost) {
  std::vector<Memory> ranks{{.on_host = 512, .on_disk = 1}, {.on_host = 512, .on_disk = 1}};
  EXPECT_THAT(offload_line(ranks), EndsWith("512 B on the host, 1 B on the disk"));
  ranks[1].on_disk = 3;
  EXPECT_THAT(offload_line(ranks),
              EndsWith("512 B on the host, 3 B on the disk (rank 1, the most)"));
}

}  // namespace
}  // namespace lockstep::plan
