// SPDX-License-Identifier: Apache-2.0
// Layouts that are found for layers of one's own.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <set>

#include "lockstep/comm/collectives.h"
#include "lockstep/nn/linear.h"
#include "lockstep/optim/adamw.h"
#include "lockstep/parallel/parallelize.h"

namespace lockstep::test::own_layers {
namespace {

using layout::MemoryStrategy;
using layout::ParallelConfig;
using layout::ShardingStrategy;
using parallel::Layer;
using parallel::layer;
using parallel::plan_layouts;
using parallel::Tensors;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr int64_t kWidth = 16, kRows = 16;

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t inner) : up(kWidth, inner), down(inner, kWidth) {
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(at::gelu(up(x))); }
  nn::Linear up, down;
};
TORCH_MODULE(Block);

std::vector<Layer> blocks(const std::vector<int64_t>& inner) {
  std::vector<Layer> layers;
  for (size_t i = 0; i < inner.size(); ++i)
    layers.push_back(layer("block" + std::to_string(i), [size = inner[i]] { return Block(size); }));
  return layers;
}

at::Tensor inputs(int64_t rows) { return at::arange(rows * kWidth).view({rows, kWidth}).sin(); }
at::Tensor square(const Tensors& out) { return out[0].square().mean(); }

parallel::LayoutSearch search(int ranks, int count) {
  return {.ranks = ranks, .cluster = "h100", .count = count, .memory = {.loss = square}};
}

template <class Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

// Losses of two steps.
std::vector<double> losses(const std::vector<Layer>& layers, const ParallelConfig& config,
                           const comm::Group& group) {
  auto model = parallel::parallelize(layers, config, group);
  optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-2});
  const comm::Group dp = model.mesh()["dp"];
  const int64_t rows = config.micro_batch_size, count = config.microbatches();
  const at::Tensor all = inputs(kRows);
  const parallel::PipelineBatch batch{
      .inputs = [&](int i) { return Tensors{all.narrow(0, (dp.rank() * count + i) * rows, rows)}; },
      .loss = [&](int, const Tensors& out) { return square(out) / count; }};
  std::vector<double> found;
  for (int step = 0; step < 2; ++step) {
    at::Tensor mine = model.step(batch).sum() / dp.size();
    comm::all_reduce(mine, dp).wait();
    found.push_back(mine.item<double>());
    optimizer.step();
    optimizer.zero_grad();
  }
  return found;
}

TEST(PlanLayouts, AllOfThemTrainAsOneProcess) {
  const auto layers = blocks({64, 64, 64, 64});
  ParallelConfig config{.micro_batch_size = 4,
                        .global_batch_size = kRows,
                        .memory = MemoryStrategy::basic,
                        .tensor_plan = {{"block*.up", layout::TensorStyle::column},
                                        {"block*.down", layout::TensorStyle::row}}};
  const auto expected = losses(layers, config, comm::Group());
  at::manual_seed(1);
  const auto planned = plan_layouts(layers, {inputs(4)}, config, search(4, 1000));
  const at::Tensor drawn = at::rand({1});
  at::manual_seed(1);
  EXPECT_TRUE(at::equal(drawn, at::rand({1}))) << "planning drew random numbers";
  ASSERT_GT(planned.size(), 20U);
  std::set<std::vector<int>> dims;
  for (size_t i = 0; i < planned.size(); ++i) {
    const ParallelConfig& each = planned[i].config;
    EXPECT_GE(planned[i].step_seconds, planned[i == 0 ? 0 : i - 1].step_seconds);
    EXPECT_GT(planned[i].memory_bytes, 0);
    EXPECT_LE(each.micro_batch_size, 4);
    // One of each shape is trained.
    if (!dims.insert({each.dims.dp, each.dims.tp, each.dims.pp}).second) continue;
    comm::run_threads(4, [&](const comm::Group& group) {
      const auto found = losses(layers, each, group);
      for (size_t step = 0; step < expected.size(); ++step)
        EXPECT_NEAR(found[step], expected[step], 1e-5);
    });
  }
  EXPECT_EQ(dims.size(), 6U);
}

// A block that takes a hundred times as long as all others together has a stage of its own.
TEST(PlanLayouts, StagesAreCutByTime) {
  const ParallelConfig config{.micro_batch_size = 128, .memory = MemoryStrategy::basic};
  const auto planned =
      plan_layouts(blocks({16, 16, 16, 65536}), {inputs(128)}, config, search(2, 1000));
  int num_pipelines = 0;
  for (const auto& each : planned) {
    if (each.config.dims.pp == 1 || each.config.chunks() > 1) continue;
    if (each.config.micro_batch_size < 128) continue;  // between two measurements
    ++num_pipelines;
    EXPECT_THAT(each.config.advanced.layer_split, ElementsAre(3, 1));
  }
  EXPECT_GT(num_pipelines, 0);
}

TEST(PlanLayouts, WhatDoesNotFitIsNotChosen) {
  const auto layers = blocks({65536, 65536});  // 2 x 8 MB, four times that with Adam
  ParallelConfig config{.micro_batch_size = 2, .memory = MemoryStrategy::basic};
  config.advanced.max_memory_per_device = 50 << 20;
  const auto planned = plan_layouts(layers, {inputs(2)}, config, search(2, 1000));
  ASSERT_FALSE(planned.empty());
  for (const auto& each : planned) {
    EXPECT_LE(each.memory_bytes, 50 << 20);
    EXPECT_TRUE(each.config.dims.pp == 2 || each.config.sharding == ShardingStrategy::full_shard);
  }
  config.advanced.max_memory_per_device = 1 << 20;
  EXPECT_THAT(error_of([&] { plan_layouts(layers, {inputs(2)}, config, search(2, 3)); }),
              HasSubstr("takes"));
}

TEST(PlanLayouts, RefusesInOneLine) {
  const auto layers = blocks({16});
  const ParallelConfig config{.micro_batch_size = 2};
  EXPECT_THAT(error_of([&] { plan_layouts(layers, {}, config, search(2, 1)); }),
              HasSubstr("0 example inputs"));
  EXPECT_THAT(error_of([&] { plan_layouts(layers, {inputs(2)}, config, search(0, 1)); }),
              HasSubstr("0 ranks"));
  EXPECT_THAT(error_of([&] { plan_layouts(layers, {at::Tensor()}, config, search(2, 1)); }),
              HasSubstr("rows"));
}

}  // namespace
}  // namespace lockstep::test::own_layers
