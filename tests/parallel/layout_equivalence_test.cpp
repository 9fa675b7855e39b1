// SPDX-License-Identifier: Apache-2.0
// Any layout of ranks trains as one process does: data, sharded, tensor, sequence and pipeline
// parallelism together, with every way to save memory.
#include <gtest/gtest.h>

#include <array>

#include "tests/parallel/pipeline/training.h"
#include "tests/support/sampling.h"

namespace lockstep::test {
namespace {

using parallel::ShardingStrategy;

PipelineTrained train(const PipelineCase& c, int rank) {
  PipelineTrained trained;
  comm::run_threads(c.world(), [&](const comm::Group& world) {
    PipelineTrained mine = train_pipeline(c, world);
    if (world.rank() == rank) trained = std::move(mine);
  });
  return trained;
}

void compare_layout(const PipelineCase& c) {
  const PipelineCurve& expected = one_process(c);
  comm::run_threads(c.world(), [&](const comm::Group& world) {
    SCOPED_TRACE(describe(c));
    expect_same(c, train_pipeline(c, world).curve, expected);
  });
}

// dp, tp and pp; all with tensor parallelism but the last ones.
constexpr std::array<layout::ParallelDims, 12> kDims = {{{1, 2, 1},
                                                         {1, 4, 1},
                                                         {2, 2, 1},
                                                         {1, 2, 2},
                                                         {4, 2, 1},
                                                         {2, 4, 1},
                                                         {2, 2, 2},
                                                         {1, 4, 2},
                                                         {1, 2, 4},
                                                         {2, 1, 2},
                                                         {4, 1, 2},
                                                         {2, 1, 4}}};

struct Model {
  bool llama, tied, qwen = false;
};
constexpr std::array<Model, 4> kModels = {
    {{false, true}, {true, false}, {false, false}, {true, true, true}}};

struct Order {
  PipelineSchedule schedule;
  int chunks;
};
constexpr std::array<Order, 6> kOrders = {{{PipelineSchedule::one_f_one_b, 1},
                                           {PipelineSchedule::interleaved, 2},
                                           {PipelineSchedule::zb_h1, 1},
                                           {PipelineSchedule::gpipe, 1},
                                           {PipelineSchedule::zb_v, 2},
                                           {PipelineSchedule::dualpipe_v, 2}}};
using layout::MemoryStrategy;
constexpr std::array<MemoryStrategy, 4> kMemory = {MemoryStrategy::basic, MemoryStrategy::standard,
                                                   MemoryStrategy::aggressive,
                                                   MemoryStrategy::extreme};
// None: DDP.
constexpr std::array<std::optional<ShardingStrategy>, 5> kShards = {
    std::nullopt, ShardingStrategy::full_shard, ShardingStrategy::shard_grad_op,
    ShardingStrategy::optimizer, ShardingStrategy::hybrid_shard};

PipelineCase make_case(const layout::ParallelDims& dims, const Model& model, const Order& order,
                       MemoryStrategy memory, std::optional<ShardingStrategy> shard,
                       bool sequence_parallel) {
  const bool pipelined = dims.pp > 1;
  PipelineCase c{.schedule = pipelined ? order.schedule : PipelineSchedule::one_f_one_b,
                 .ranks = dims.pp,
                 .dp = dims.dp,
                 .tp = dims.tp,
                 .sequence_parallel = sequence_parallel && dims.tp > 1,
                 .chunks = pipelined ? order.chunks : 1,
                 .microbatches = std::max(4, 2 * dims.pp),
                 .llama = model.llama,
                 .tied = model.tied,
                 .qwen = model.qwen,
                 .recompute = layout::ParallelConfig{.memory = memory}.recompute(),
                 .disk = memory == MemoryStrategy::extreme ? testing::TempDir() : ""};
  if (!shard || dims.dp == 1) return c;
  c.shard =
      parallel::FullyShardOptions{.strategy = *shard, .min_num_params = 1, .use_orig_params = true};
  c.shard->units = units_of_language_model();
  if (*shard == ShardingStrategy::hybrid_shard) c.shard->advanced.hybrid_group_size = dims.dp / 2;
  return c;
}

class EveryLayout : public testing::TestWithParam<layout::ParallelDims> {};

// Three of the choices for each, in turns; or each choice with every other one.
TEST_P(EveryLayout, TrainsAsOneProcess) {
  const layout::ParallelDims& dims = GetParam();
  if (tests_all()) {
    for (size_t order = 0; order < 6; ++order) {
      for (size_t shard = 0; shard < 5; ++shard) {
        for (size_t n = order + shard; n < order + shard + 2; ++n) {
          compare_layout(make_case(dims, kModels[n % 4], kOrders[order], kMemory[(n + shard) % 4],
                                   kShards[shard], (order / 2 + shard / 2) % 2 == 1));
        }
      }
    }
    return;
  }
  const auto first = static_cast<size_t>(7 * dims.dp + 3 * dims.tp + dims.pp);
  for (size_t i = first % 2; i < 6; i += 2) {
    const size_t n = first + i;  // always even
    compare_layout(make_case(dims, kModels[n / 2 % 4], kOrders[i], kMemory[(n + n / 4) % 4],
                             kShards[(n + i / 5) % 5], (n / 2 + first) % 2 == 0));
  }
}

INSTANTIATE_TEST_SUITE_P(Grid, EveryLayout, testing::ValuesIn(kDims),
                         [](const testing::TestParamInfo<layout::ParallelDims>& info) {
                           const auto& dims = info.param;
                           return "dp" + std::to_string(dims.dp) + "tp" + std::to_string(dims.tp) +
                                  "pp" + std::to_string(dims.pp);
                         });

// A sum over ranks takes the place of the product that is kept.
TEST(Layouts, ProductsAreKeptUnderTensorParallelism) {
  for (const bool sequence : {false, true}) {
    compare_layout(
        make_case({1, 2, 1}, kModels[1], kOrders[0], MemoryStrategy::standard, {}, sequence));
  }
}

// Where ranks share matrices, the other axes still change no bit.
TEST(Layouts, DataShardsAndStagesChangeNoBitBesideTensorParallelism) {
  for (const bool sequence : {false, true}) {
    PipelineCase alone =
        make_case({1, 2, 1}, kModels[1], kOrders[0], MemoryStrategy::basic, {}, sequence);
    alone.microbatches = 8;
    alone.reproducible = true;
    const PipelineTrained expected = train(alone, 0);
    PipelineCase c = make_case({2, 2, 2}, kModels[1], kOrders[2], MemoryStrategy::extreme,
                               ShardingStrategy::full_shard, sequence);
    c.reproducible = true;
    c.shard->reproducible = true;
    ASSERT_EQ(spec_of(c), spec_of(alone));
    const PipelineTrained found = train(c, 0);
    EXPECT_EQ(found.curve.losses, expected.curve.losses);
    EXPECT_EQ(found.curve.norms, expected.curve.norms);
  }
}

}  // namespace
}  // namespace lockstep::test
