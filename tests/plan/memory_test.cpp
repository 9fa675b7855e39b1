// SPDX-License-Identifier: Apache-2.0
// What a list of layers takes; tests/config/plan has the built-in models.
#include "lockstep/plan/memory.h"

#include <gtest/gtest.h>

#include "lockstep/plan/run_description.h"

namespace lockstep::plan {
namespace {

// Four layers of 64 parameters, each of which keeps 1000 bytes for backward.
Run four_layers() {
  LayerKind kind{.cost = {.kept = 1000,
                          .forward_peak = 1500,
                          .backward_peak = 1800,
                          .backward_peak_keeping = 2000,
                          .weights = 256},
                 .units = {{{.name = "weight", .shapes = {{8, 8}}}}}};
  Run run;
  run.model.kinds = {kind};
  run.model.layers = {{"0.", 0}, {"1.", 0}, {"2.", 0}, {"3.", 0}};
  run.model.stream_bytes = 50;
  return run;
}

TEST(MemoryOfLayers, OneRankHasAllOfThem) {
  const auto ranks = memory_per_rank(four_layers());
  ASSERT_EQ(ranks.size(), 1u);
  EXPECT_EQ(ranks[0].parameters, 4 * 64 * 4);
  EXPECT_EQ(ranks[0].optimizer, 4 * 64 * 8);
  // Autograd makes the gradients, and the peak has the last layer's backward: they count once.
  EXPECT_EQ(ranks[0].gradients, 4 * 64 * 4);
  EXPECT_EQ(ranks[0].activations, 3 * 1000 + 2000 - 4 * 64 * 4);
  EXPECT_EQ(ranks[0].buffers, 0);
}

TEST(MemoryOfLayers, StagesOfAPipelineHaveTheirs) {
  auto run = four_layers();
  run.dims.pp = 2;
  run.pipeline = schedule::ScheduleOptions{.ranks = 2};
  run.layers_per_stage = {3, 1};
  const auto ranks = memory_per_rank(run);
  ASSERT_EQ(ranks.size(), 2u);
  EXPECT_EQ(ranks[0].parameters, 3 * 64 * 4);
  EXPECT_EQ(ranks[1].parameters, 64 * 4);
  EXPECT_EQ(ranks[1].buffers, 2 * 50);
  run.dims.dp = 2;
  run.order = layout::Order::tp_fastest;  // stages are slowest
  const auto four = memory_per_rank(run);
  EXPECT_EQ(four[1].parameters, 3 * 64 * 4);
  EXPECT_EQ(four[2].parameters, 64 * 4);
}

// Four tensors of 64 elements and, in the first layer, one of 32 in another unit and in front.
TEST(MemoryOfLayers, WholeTensorsHaveOneOwner) {
  auto run = four_layers();
  run.dims.dp = run.shards = 3;
  run.sharding = layout::ShardingStrategy::optimizer;
  run.granularity = layout::ShardGranularity::tensors;
  run.min_sharded = 16;
  auto ranks = memory_per_rank(run);  // owners 0, 1, 2, 0
  EXPECT_EQ(ranks[0].parameters, 4 * 64 * 4);
  EXPECT_EQ(ranks[0].optimizer, 2 * 64 * 8);
  EXPECT_EQ(ranks[1].optimizer, 64 * 8);
  EXPECT_EQ(ranks[2].optimizer, 64 * 8);
  EXPECT_EQ(ranks[0].gradients, (4 + 2) * 64 * 4);
  EXPECT_EQ(ranks[1].gradients, (4 + 1) * 64 * 4);
  run.dims.dp = run.shards = 6;  // ranks without a tensor
  ranks = memory_per_rank(run);
  EXPECT_EQ(ranks[3].optimizer, 64 * 8);
  EXPECT_EQ(ranks[4].optimizer, 0);
  EXPECT_EQ(ranks[5].gradients, 4 * 64 * 4);

  LayerKind first = run.model.kinds[0];
  first.units[0][0].places = {1};
  first.units[0].push_back({.name = "bias", .shapes = {{32}}, .places = {0}});
  run.model.kinds.push_back(first);
  run.model.layers[0].kind = 1;
  run.dims.dp = run.shards = 2;  // bias 0, weights 1, 0, 1, 0
  ranks = memory_per_rank(run);
  EXPECT_EQ(ranks[0].optimizer, (32 + 2 * 64) * 8);
  EXPECT_EQ(ranks[1].optimizer, 2 * 64 * 8);
  run.model.kinds[1].units[0][1].trained = false;  // counted by itself: weights 0, 1, 0, 1
  ranks = memory_per_rank(run);
  EXPECT_EQ(ranks[0].optimizer, 2 * 64 * 8);
  EXPECT_EQ(ranks[1].optimizer, 2 * 64 * 8);
  run.sharding = layout::ShardingStrategy::full_shard;
  ranks = memory_per_rank(run);
  EXPECT_EQ(ranks[0].parameters, (32 + 2 * 64) * 4);
  EXPECT_EQ(ranks[1].parameters, 2 * 64 * 4);
}

TEST(MemoryOfLayers, CountsEachTensorAsItIs) {
  auto run = four_layers();
  run.model.kinds[0].buffers = 40;
  run.model.kinds[0].units[0][0].element = 8;
  EXPECT_EQ(memory_per_rank(run)[0].parameters, 4 * (64 * 8 + 40));
  EXPECT_EQ(memory_per_rank(run)[0].optimizer, 4 * 64 * 16);
  run.model.kinds[0].units[0][0].trained = false;
  EXPECT_EQ(memory_per_rank(run)[0].gradients, 0);
  EXPECT_EQ(memory_per_rank(run)[0].optimizer, 0);
  run.dims.dp = run.shards = 2;
  run.sharding = layout::ShardingStrategy::full_shard;
  run.min_sharded = 1;
  EXPECT_EQ(memory_per_rank(run)[1].parameters, 4 * (64 * 8 / 2 + 40));
  EXPECT_EQ(memory_per_rank(run)[1].gradients, 0);
}

}  // namespace
}  // namespace lockstep::plan
