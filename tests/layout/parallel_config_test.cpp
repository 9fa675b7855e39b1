// SPDX-License-Identifier: Apache-2.0
#include "lockstep/layout/parallel_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "lockstep/core/error.h"
#include "tests/support/refused.h"

namespace lockstep::layout {
namespace {

using test::refused;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::ThrowsMessage;

void expect_refused(const ParallelConfig& config, int world_size, const std::string& message) {
  EXPECT_THAT([&] { config.validate(world_size); }, refused(message));
}

TEST(ParallelConfig, Defaults) {
  const ParallelConfig config;
  EXPECT_EQ(config.dims, ParallelDims{});
  EXPECT_EQ(config.advanced.num_layers, 0);
  EXPECT_TRUE(config.advanced.layer_split.empty());
  EXPECT_EQ(config.micro_batch_size, 1);
  EXPECT_EQ(config.memory, MemoryStrategy::standard);
  EXPECT_FALSE(config.advanced.communication.has_value());
  EXPECT_FALSE(config.advanced.gradient_checkpointing.has_value());
  EXPECT_FALSE(config.mixed_precision);
  EXPECT_EQ(config.schedule, PipelineSchedule::interleaved);
  EXPECT_EQ(config.advanced.max_memory_per_device, 0);
  EXPECT_EQ(config.advanced.communication_timeout, milliseconds{0});
  EXPECT_NO_THROW(config.validate(1));
}

TEST(ParallelConfig, StrategySetsRecomputation) {
  const auto recompute = [](MemoryStrategy memory) {
    return ParallelConfig{.memory = memory}.recompute();
  };
  EXPECT_EQ(recompute(MemoryStrategy::basic), Recompute::none);
  EXPECT_EQ(recompute(MemoryStrategy::standard), Recompute::selective);
  EXPECT_EQ(recompute(MemoryStrategy::aggressive), Recompute::full);
  EXPECT_EQ(recompute(MemoryStrategy::extreme), Recompute::full);
}

TEST(ParallelConfig, ExplicitSwitchWins) {
  for (const auto memory : {MemoryStrategy::basic, MemoryStrategy::standard,
                            MemoryStrategy::aggressive, MemoryStrategy::extreme}) {
    ParallelConfig config{.memory = memory,
                          .advanced = {.gradient_checkpointing = Recompute::full}};
    EXPECT_EQ(config.recompute(), Recompute::full);
    config.advanced.gradient_checkpointing = Recompute::none;
    EXPECT_EQ(config.recompute(), Recompute::none);
    // The switch is about recomputation; where saved activations rest is the strategy's.
    EXPECT_EQ(config.activations_to_disk(), memory == MemoryStrategy::extreme);
  }
}

TEST(ParallelConfig, WorldSizeRule) {
  expect_refused(ParallelConfig{.dims = {2, 2, 3}}, 8,
                 "[parallel_dims] ... dp 2 x tp 2 x pp 3 = 12 ... world size 8");
}

ParallelConfig pipeline_of(int pp, PipelineSchedule schedule,
                           ParallelAdvancedConfig advanced = {}) {
  return {.dims = {1, 1, pp}, .schedule = schedule, .advanced = std::move(advanced)};
}

TEST(ParallelConfig, LayersDivideOverStages) {
  EXPECT_THAT(pipeline_of(4, PipelineSchedule::one_f_one_b).layers_per_stage(24),
              ElementsAre(6, 6, 6, 6));
  expect_refused(pipeline_of(5, PipelineSchedule::one_f_one_b, {.num_layers = 24}), 5,
                 "[parallel_config] ... 24 layers ... divisible by pp 5 ... layer split");
  expect_refused(ParallelConfig{.advanced = {.num_layers = -1}}, 1,
                 "[parallel_config] ... -1 layers ... at least 1, or 0");
}

// A schedule that needs chunks takes as few as it can, and says what would divide.
TEST(ParallelConfig, ChunksFollowTheSchedule) {
  EXPECT_EQ(pipeline_of(2, PipelineSchedule::interleaved).chunks(), 2);
  EXPECT_EQ(pipeline_of(2, PipelineSchedule::dualpipe_v).chunks(), 2);
  EXPECT_EQ(pipeline_of(2, PipelineSchedule::gpipe).chunks(), 1);
  EXPECT_EQ(pipeline_of(2, PipelineSchedule::interleaved, {.chunks = 3}).chunks(), 3);
  EXPECT_EQ(pipeline_of(1, PipelineSchedule::interleaved).chunks(), 1);
  EXPECT_THAT(pipeline_of(2, PipelineSchedule::interleaved).layers_per_stage(8),
              ElementsAre(2, 2, 2, 2));
  expect_refused(pipeline_of(4, PipelineSchedule::interleaved, {.num_layers = 12}), 4,
                 "[parallel_config] ... 12 layers ... divisible by pp 4 x 2 chunks = 8 stages ... "
                 "them: 3; schedule 1f1b ... layer split");
  expect_refused(pipeline_of(1, PipelineSchedule::interleaved, {.chunks = 2}), 1,
                 "[parallel_config] chunks is 2, but pp is 1: leave it out");
}

TEST(ParallelConfig, ExplicitSplitOfLayers) {
  const auto with_split = [](std::vector<int> split) {
    return pipeline_of(3, PipelineSchedule::one_f_one_b,
                       {.num_layers = 10, .layer_split = std::move(split)});
  };
  EXPECT_NO_THROW(with_split({3, 4, 3}).validate(3));
  EXPECT_THAT(with_split({3, 4, 3}).layers_per_stage(10), ElementsAre(3, 4, 3));
  expect_refused(with_split({5, 5}), 3,
                 "[parallel_config] ... layer split (5, 5) ... 2 entries ... pp 3");
  expect_refused(with_split({3, 4, 4}), 3,
                 "[parallel_config] layer split (3, 4, 4) sums to 11, must sum to 10 layers");
  expect_refused(with_split({0, 5, 5}), 3,
                 "[parallel_config] ... layer split (0, 5, 5) ... at least 1 layer");
}

TEST(ParallelConfig, MicroBatchesOfAStep) {
  EXPECT_EQ((ParallelConfig{.dims = {.dp = 2}, .micro_batch_size = 3}.microbatches()), 1);
  EXPECT_EQ((ParallelConfig{.dims = {.dp = 2}, .micro_batch_size = 3, .global_batch_size = 24}
                 .microbatches()),
            4);
  expect_refused(ParallelConfig{.dims = {.dp = 2}, .micro_batch_size = 3, .global_batch_size = 9},
                 2, "[parallel_config] ... global batch size 9 ... multiple ... size 3 x dp 2 = 6");
}

TEST(ParallelConfig, TensorParallelismNeedsAPlan) {
  expect_refused(ParallelConfig{.dims = {.tp = 2}}, 2,
                 "[parallel_config] ... tp is 2 ... plan is empty");
  expect_refused(ParallelConfig{.advanced = {.sequence_parallel = true}}, 1,
                 "[parallel_config] ... parallelism is on ... tp is 1 ... at least 2");
}

TEST(LayersPerStage, EqualSharesOrTheSplitOrNothing) {
  EXPECT_EQ(layers_per_stage(6, 3, {}), std::vector({2, 2, 2}));
  EXPECT_EQ(layers_per_stage(6, 3, {3, 1, 2}), std::vector({3, 1, 2}));
  EXPECT_EQ(layers_per_stage(7, 3, {}), std::nullopt);
  EXPECT_EQ(layers_per_stage(0, 3, {}), std::nullopt);
  EXPECT_EQ(layers_per_stage(6, 3, {3, 3}), std::nullopt);
  EXPECT_EQ(layers_per_stage(6, 3, {0, 3, 3}), std::nullopt);
  EXPECT_EQ(layers_per_stage(6, 3, {3, 3, 3}), std::nullopt);
}

TEST(ParallelConfig, PositiveNumbers) {
  expect_refused(ParallelConfig{.micro_batch_size = 0}, 1,
                 "[parallel_config] ... micro-batch size 0 ... greater than 0");
  expect_refused(ParallelConfig{.advanced = {.max_memory_per_device = -1}}, 1,
                 "[parallel_config] ... memory per device -1 bytes ... greater than 0");
  expect_refused(
      ParallelConfig{.advanced = {.communication_timeout = milliseconds{-1}}}, 1,
      "[parallel_config] ... communication timeout -1 ms ... greater than 0, or 0: the group's");
}

template <class Enum, class Parse>
void expect_round_trip(int count, Parse parse) {
  for (int i = 0; i < count; ++i) {
    const auto value = static_cast<Enum>(i);
    EXPECT_EQ(parse(name_of(value)), value) << name_of(value);
  }
}

TEST(ParallelConfig, NamesGoBothWays) {
  expect_round_trip<MemoryStrategy>(4, parse_memory_strategy);
  expect_round_trip<CommStrategy>(5, parse_comm_strategy);
  expect_round_trip<PipelineSchedule>(12, parse_pipeline_schedule);
  expect_round_trip<Recompute>(3, parse_recompute);
  expect_round_trip<ShardingStrategy>(5, parse_sharding_strategy);
  EXPECT_EQ(parse_sharding_strategy("grad_op"), ShardingStrategy::shard_grad_op);
  EXPECT_EQ(name_of(MemoryStrategy::aggressive), "aggressive");
  EXPECT_EQ(name_of(CommStrategy::hierarchical), "hierarchical");
  EXPECT_EQ(name_of(PipelineSchedule::one_f_one_b), "1f1b");
  EXPECT_EQ(name_of(PipelineSchedule::round_robin), "round-robin");
  EXPECT_EQ(name_of(PipelineSchedule::interleaved), "interleaved");
  EXPECT_EQ(name_of(PipelineSchedule::zb_1p), "zb-1p");
  EXPECT_EQ(name_of(PipelineSchedule::file), "file");
}

TEST(ParallelConfig, UnknownNamesListTheKnown) {
  EXPECT_THAT([] { parse_memory_strategy("huge"); },
              refused("[memory strategy] ... 'huge' ... basic, standard, aggressive, extreme"));
  EXPECT_THAT(
      [] { parse_sharding_strategy("zero3"); },
      refused("[sharding strategy] ... 'zero3' ... none, full, grad_op, optimizer, hybrid"));
  EXPECT_THAT([] { parse_comm_strategy(""); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("''"), HasSubstr("adaptive"))));
  EXPECT_THAT(
      [] { parse_pipeline_schedule("1F1B"); },
      ThrowsMessage<ConfigError>(HasSubstr("round-robin, sequential, gpipe, 1f1b, interl")));
}

}  // namespace
}  // namespace lockstep::layout
