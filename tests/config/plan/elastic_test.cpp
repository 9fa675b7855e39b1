// SPDX-License-Identifier: Apache-2.0
// The layouts of a run that continues with fewer ranks.
#include "lockstep/config/plan/elastic.h"

#include <gtest/gtest.h>

#include "lockstep/core/error.h"
#include "tests/support/says.h"

namespace lockstep::test {
namespace {

using config::elastic_layout;
using config::elastic_sizes;

// 8 rows at a time on each rank that has rows of its own.
config::TrainConfig elastic_run(int least, int full) {
  config::TrainConfig run;
  run.data.path = "text";
  run.model = {.layers = 12, .hidden = 48, .heads = 12, .vocab = 256};
  run.train.seq_len = 48;
  run.train.micro_batch = 1;
  run.train.global_batch = 5040;  // so many numbers of ranks divide it
  run.run.ranks = full;
  run.run.min_ranks = least;
  return run;
}

std::string text_on(const config::TrainConfig& run, int world) {
  const auto layout = elastic_layout(run, run.model, run.run.ranks, world);
  if (!layout) return "none";
  layout->config.validate(world);
  return config::layout_text(layout->config, world) + (layout->changes_less ? "" : ", changed");
}

TEST(ElasticLayout, KeepsTheOtherAxesAndShrinksDataParallelism) {
  auto run = elastic_run(1, 8);
  EXPECT_EQ(text_on(run, 7), "dp 7");
  run.parallel.tp = 2;
  EXPECT_EQ(text_on(run, 8), "dp 4 x tp 2");
  EXPECT_EQ(text_on(run, 6), "dp 3 x tp 2");
  EXPECT_EQ(text_on(run, 2), "dp 1 x tp 2");
  run.parallel.pp = 2;
  run.parallel.dp = 2;
  EXPECT_EQ(text_on(run, 4), "dp 1 x tp 2 x pp 2");
}

TEST(ElasticLayout, ChangesPipelinesFirstAndTensorParallelismLast) {
  auto run = elastic_run(1, 12);
  run.parallel.tp = 2;
  run.parallel.cp = 2;
  run.parallel.pp = 3;
  run.parallel.split = {5, 4, 5};
  run.parallel.schedule = layout::PipelineSchedule::gpipe;
  EXPECT_EQ(text_on(run, 8), "dp 1 x tp 2 x cp 2 x pp 2, changed");
  EXPECT_EQ(text_on(run, 4), "dp 1 x tp 2 x cp 2, changed");
  EXPECT_EQ(text_on(run, 2), "dp 1 x tp 2, changed");
  EXPECT_EQ(text_on(run, 1), "dp 1, changed");
  run.parallel = {.tp = 4, .sequence_parallel = true};
  EXPECT_EQ(text_on(run, 3), "dp 1 x tp 3, changed");
  EXPECT_EQ(text_on(run, 1), "dp 1, changed");
}

TEST(ElasticLayout, TheBatchAndTheSeedStay) {
  auto run = elastic_run(2, 4);
  run.train.global_batch = 0;
  run.train.micro_batch = 3;
  for (const int world : {2, 4}) {
    const auto layout = elastic_layout(run, run.model, 4, world);
    ASSERT_TRUE(layout);
    EXPECT_EQ(layout->config.train.global_batch, 12);
    EXPECT_EQ(layout->config.train.micro_batch, 3);
    EXPECT_EQ(layout->config.train.seed, run.train.seed);
  }
}

TEST(ElasticLayout, HybridShardingNeedsWholeGroupsOrKeepsWholeCopies) {
  auto run = elastic_run(2, 8);
  run.parallel.shard = layout::ShardingStrategy::hybrid_shard;
  run.parallel.shard_size = 2;
  EXPECT_EQ(elastic_sizes(run, run.model).at(7).ranks, 6);
  const auto odd = elastic_layout(run, run.model, 8, 3);
  ASSERT_TRUE(odd);
  EXPECT_EQ(odd->config.parallel.shard_size, 1);
}

TEST(ElasticLayout, OfSizesTheLargestThatKeepsTheAxesIsChosen) {
  auto run = elastic_run(2, 8);
  run.parallel.tp = 4;
  const auto sizes = elastic_sizes(run, run.model);
  EXPECT_EQ(sizes.at(8).ranks, 8);
  EXPECT_EQ(sizes.at(7).ranks, 4);
  EXPECT_EQ(sizes.at(4).layout, "dp 1 x tp 4");
  EXPECT_EQ(sizes.at(3).ranks, 3);
  EXPECT_EQ(sizes.at(3).layout, "dp 1 x tp 3");
  EXPECT_EQ(sizes.at(2).layout, "dp 1 x tp 2");
}

TEST(ElasticLayout, ASmallestNumberWithoutALayoutNamesTheNearest) {
  auto run = elastic_run(2, 4);
  run.parallel.shard = layout::ShardingStrategy::full_shard;
  const config::ModelSpec model = config::elastic_model(run);
  // The state of a quarter fits, that of a third does not.
  run.memory.max_per_device = model.parameters() * 16 * 2 / 7;
  try {
    elastic_sizes(run, model);
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(),
                says("-n 2:4 ... 2 ranks ... memory.max_per_device ... nearest ... 4"));
  }
}

}  // namespace
}  // namespace lockstep::test
