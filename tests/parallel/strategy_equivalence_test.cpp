// SPDX-License-Identifier: Apache-2.0
// Every way to spread a model trains as one process does, whichever strategy its groups have.
#include <gtest/gtest.h>

#include "tests/parallel/pipeline/training.h"

namespace lockstep::test {
namespace {

using layout::CommStrategy;
using parallel::ShardingStrategy;

struct StrategyCase {
  const char* name;
  layout::ParallelDims dims;
  std::optional<ShardingStrategy> shard;
};

class EveryStrategy : public testing::TestWithParam<std::tuple<CommStrategy, StrategyCase>> {};

TEST_P(EveryStrategy, TrainsAsOneProcess) {
  const auto& [strategy, how] = GetParam();
  const auto& dims = how.dims;
  PipelineCase c{.ranks = dims.pp,
                 .dp = dims.dp,
                 .tp = dims.tp,
                 .sequence_parallel = dims.tp > 1,
                 .microbatches = 4,
                 .steps = 4};
  if (how.shard) {
    c.shard = parallel::FullyShardOptions{
        .strategy = *how.shard, .min_num_params = 1, .use_orig_params = true};
    c.shard->units = units_of_language_model();
  }
  // Hosts of different sizes, and axes that cross them.
  std::vector<int> hosts;
  for (int rank = 0; rank < c.world(); ++rank) hosts.push_back(rank % 3 == 2 ? 1 : 0);
  const PipelineCurve& expected = one_process(c);
  comm::run_threads(
      c.world(),
      [&](const comm::Group& world) { expect_same(c, train_pipeline(c, world).curve, expected); },
      {.backend = "thread", .strategy = strategy}, hosts);
}

INSTANTIATE_TEST_SUITE_P(
    , EveryStrategy,
    testing::Combine(
        testing::Values(CommStrategy::ring, CommStrategy::tree, CommStrategy::hierarchical),
        testing::Values(StrategyCase{"ddp", {4, 1, 1}, {}},
                        StrategyCase{"sharded", {4, 1, 1}, ShardingStrategy::full_shard},
                        StrategyCase{"tensor", {1, 4, 1}, {}},
                        StrategyCase{"pipeline", {2, 1, 2}, {}},
                        StrategyCase{"all", {2, 2, 2}, ShardingStrategy::full_shard})),
    [](const auto& info) {
      return std::string(layout::name_of(std::get<0>(info.param))) + "_" +
             std::get<1>(info.param).name;
    });

}  // namespace
}  // namespace lockstep::test
