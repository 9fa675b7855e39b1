// SPDX-License-Identifier: Apache-2.0
#include "lockstep/plan/step_time.h"

#include <gtest/gtest.h>

#include <cmath>

#include "lockstep/core/error.h"

namespace lockstep::plan {
namespace {

using layout::Order;
using layout::PipelineSchedule;
using layout::Recompute;
using layout::ShardingStrategy;

ModelShape gpt(int64_t layers, int64_t hidden, int64_t heads, int64_t vocab) {
  return {.layers = layers,
          .hidden = hidden,
          .heads = heads,
          .kv_heads = heads,
          .head_size = hidden / heads,
          .ffn = 4 * hidden,
          .vocab = vocab,
          .tied = true};
}

std::vector<int> equal_stages(int64_t layers, int stages) {
  std::vector<int> counts(static_cast<size_t>(stages), static_cast<int>(layers / stages));
  ++counts.front();
  ++counts.back();
  return counts;
}

// As Megatron-LM was in 2021: attention in several kernels, nothing overlapped, and messages that
// the tensor-parallel ranks share. The constants are those that fit other runs on such devices
// (bench/planner.py, vTrain); none is fitted on the rows below.
Cluster megatron() {
  Cluster cluster = typical_cluster("a100");
  cluster.efficiency = {.product = 0.77, .product_half = 2e10, .memory = 0.8, .launch = 2.2e-3};
  cluster.links.network_bandwidth = 180e9;
  cluster.software.overlap = 0;
  cluster.software.logit_bytes = 20;
  cluster.software.score_bytes = 12;
  cluster.software.scatter_messages = true;
  return cluster;
}

// Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
// Megatron-LM" (SC21), table 1: achieved TFLOP/s a GPU. Micro-batches and chunks are those of
// examples/sc21 in Megatron-LM.
TEST(StepTime, TenPublishedRunsOfMegatron) {
  struct Run {
    int64_t heads, hidden, layers;
    int tp, pp, gpus, batch;
    double tflops;
    int micro, chunks;
  };
  const std::vector<Run> runs = {{24, 2304, 24, 1, 1, 32, 512, 137, 16, 1},
                                 {32, 3072, 30, 2, 1, 64, 512, 138, 16, 1},
                                 {32, 4096, 36, 4, 1, 128, 512, 142, 16, 1},
                                 {48, 6144, 40, 8, 1, 256, 1024, 135, 8, 1},
                                 {64, 8192, 48, 8, 2, 512, 1536, 138, 4, 1},
                                 {80, 10240, 60, 8, 4, 1024, 1792, 140, 2, 3},
                                 {96, 12288, 80, 8, 8, 1536, 2304, 148, 2, 2},
                                 {128, 16384, 96, 8, 16, 1920, 2160, 155, 1, 2},
                                 {128, 20480, 105, 8, 35, 2520, 2520, 163, 1, 3},
                                 {160, 25600, 128, 8, 64, 3072, 3072, 163, 1, 1}};
  double sum = 0;
  for (const Run& run : runs) {
    const double length = 2048, vocab = 51200, layers = static_cast<double>(run.layers);
    const auto h = static_cast<double>(run.hidden);
    const double flop = 96 * run.batch * length * layers * h * h *
                        (1 + length / (6 * h) + vocab / (16 * layers * h));
    const double measured = flop / run.gpus / run.tflops / 1e12;
    const int dp = run.gpus / run.tp / run.pp;
    Layout layout{
        .dims = {dp, run.tp, run.pp},
        .order = Order::tp_fastest,
        .schedule = run.chunks > 1 ? PipelineSchedule::interleaved : PipelineSchedule::one_f_one_b,
        .chunks = run.chunks,
        .sequence = 2048,
        .micro_batch = run.micro,
        .micro_batches = run.batch / dp / run.micro,
        .recompute = Recompute::full};
    if (run.pp > 1) layout.layers_per_stage = equal_stages(run.layers, run.pp * run.chunks);
    const double predicted =
        step_time(gpt(run.layers, run.hidden, run.heads, 51200), layout, megatron()).total();
    sum += std::abs(predicted / measured - 1);
    EXPECT_NEAR(predicted / measured, 1, 0.12) << run.gpus << " GPUs";
  }
  EXPECT_LE(sum / static_cast<double>(runs.size()), 0.07);
}

Layout pipeline(PipelineSchedule schedule, int chunks) {
  return {.dims = {2, 2, 4},
          .order = Order::tp_fastest,
          .schedule = schedule,
          .chunks = chunks,
          .layers_per_stage = equal_stages(16, 4 * chunks),
          .sequence = 1024,
          .micro_batch = 1,
          .micro_batches = 16};
}

TEST(StepTime, ClosedFormsAreCloseToTheSimulation) {
  const ModelShape model = gpt(16, 2048, 16, 50304);
  const Cluster cluster = typical_cluster("h100");
  for (const auto& [schedule, chunks] : {std::pair{PipelineSchedule::one_f_one_b, 1},
                                         {PipelineSchedule::interleaved, 2},
                                         {PipelineSchedule::interleaved, 4},
                                         {PipelineSchedule::zb_h1, 1},
                                         {PipelineSchedule::zb_v, 2},
                                         {PipelineSchedule::gpipe, 1}}) {
    const Layout layout = pipeline(schedule, chunks);
    const double simulated = step_time(model, layout, cluster).total();
    const double estimated = step_time(model, layout, cluster, Pipelined::estimated).total();
    EXPECT_NEAR(estimated / simulated, 1, 0.06) << layout::name_of(schedule) << " x " << chunks;
  }
}

TEST(StepTime, TheHeadMakesItsStageSlower) {
  const ModelShape model = gpt(16, 2048, 16, 200000);
  Layout layout = pipeline(PipelineSchedule::one_f_one_b, 1);
  const Cluster cluster = typical_cluster("h100");
  const double equal = step_time(model, layout, cluster).total();
  layout.layers_per_stage = {6, 5, 5, 2};
  EXPECT_LT(step_time(model, layout, cluster).total(), 0.95 * equal);
}

TEST(StepTime, WhatMoreHardwareChanges) {
  const ModelShape model = gpt(16, 4096, 32, 50304);
  const Layout layout{.dims = {8, 8, 1},
                      .order = Order::tp_fastest,
                      .sequence = 2048,
                      .micro_batch = 1,
                      .micro_batches = 1};
  Cluster cluster = typical_cluster("h100");
  const StepTime before = step_time(model, layout, cluster);
  EXPECT_GT(before.tensor, 0);
  EXPECT_GT(before.data, 0);
  EXPECT_EQ(before.bubble, 0);
  cluster.links.host_bandwidth *= 2;
  EXPECT_LT(step_time(model, layout, cluster).tensor, before.tensor);
  cluster.links.network_bandwidth *= 2;
  EXPECT_LT(step_time(model, layout, cluster).data, before.data);
  cluster.efficiency.launch = 1;
  const StepTime bound = step_time(model, layout, cluster);
  EXPECT_GT(bound.host, 16 * 2.9);
  EXPECT_GT(bound.total(), 16 * 3);
}

// Each has its part of the tokens; keys and values of long rows hide under attention in a ring.
TEST(StepTime, RanksThatShareRowsExchangeKeys) {
  const ModelShape model = gpt(16, 4096, 32, 50304);
  Layout layout{.dims = {8, 1, 1}, .sequence = 32768, .micro_batch = 1, .micro_batches = 2};
  const Cluster cluster = typical_cluster("h100");
  const StepTime alone = step_time(model, layout, cluster);
  EXPECT_EQ(alone.context, 0);
  EXPECT_EQ(layout.tokens(), 8 * 2 * 32768);
  layout.cp = 4;
  EXPECT_EQ(layout.tokens(), 2 * 2 * 32768);
  const StepTime gathered = step_time(model, layout, cluster);
  EXPECT_NEAR(gathered.compute, alone.compute / 4, 0.05 * alone.compute / 4);
  EXPECT_GT(gathered.context, 0);
  layout.ring = true;
  const StepTime ring = step_time(model, layout, cluster);
  EXPECT_GT(ring.context, 0);
  EXPECT_LT(ring.context, 0.5 * gathered.context);
  EXPECT_EQ(ring.compute, gathered.compute);
  layout.sequence = 2048;  // too short to hide anything
  const StepTime hidden = step_time(model, layout, cluster);
  EXPECT_GT(hidden.context / hidden.compute, 5 * ring.context / ring.compute);
}

// A part of the computation for each doubling of the ranks that share a layer, and nothing for one.
TEST(StepTime, RanksThatShareALayerWaitForEachOther) {
  const ModelShape model = gpt(16, 4096, 32, 50304);
  Layout layout{.dims = {1, 4, 1}, .sequence = 2048, .micro_batch = 8, .micro_batches = 2};
  Cluster cluster = typical_cluster("h100");
  const LayerTime before = layer_times(model, layout, cluster).block;
  const double total = step_time(model, layout, cluster).total();
  cluster.software.waiting = 0.1;
  const LayerTime after = layer_times(model, layout, cluster).block;
  EXPECT_NEAR(after.forward.tensor - before.forward.tensor, 0.2 * before.forward.compute, 1e-12);
  EXPECT_NEAR(after.backward().tensor - before.backward().tensor, 0.2 * before.backward().compute,
              1e-12);
  EXPECT_GT(step_time(model, layout, cluster).total(), 1.1 * total);
  layout.dims.tp = 1;
  EXPECT_EQ(layer_times(model, layout, cluster).block.forward.tensor, 0);
}

// In the bubbles of a pipeline the ranks that compute have more of the host; others never wait.
TEST(StepTime, RanksOfAPipelineAreLessCrowded) {
  const ModelShape model = gpt(16, 4096, 32, 50304);
  Layout layout{.dims = {2, 1, 4},
                .layers_per_stage = {5, 4, 4, 5},
                .sequence = 2048,
                .micro_batch = 8,
                .micro_batches = 4};
  Cluster cluster = typical_cluster("h100");
  const double crowded = step_time(model, layout, cluster).total();
  const double estimated = step_time(model, layout, cluster, Pipelined::estimated).total();
  cluster.efficiency.alone = 0.5;
  cluster.efficiency.alone_head = 0.5;
  const StepTime step = step_time(model, layout, cluster);
  EXPECT_LT(step.total(), 0.95 * crowded);
  EXPECT_GT(step.total(), 0.5 * crowded);
  EXPECT_LT(step_time(model, layout, cluster, Pipelined::estimated).total(), 0.95 * estimated);
  cluster.efficiency.alone_head = 0.25;
  EXPECT_LT(step_time(model, layout, cluster).total(), step.total());
  EXPECT_EQ(step.optimizer, step_time(model, layout, typical_cluster("h100")).optimizer);
  layout.dims = {8, 1, 1};
  layout.layers_per_stage.clear();
  const double whole = step_time(model, layout, cluster).total();
  EXPECT_EQ(whole, step_time(model, layout, typical_cluster("h100")).total());
}

TEST(StepTime, ShardingCostsGathersAndSavesUpdates) {
  const ModelShape model = gpt(16, 4096, 32, 50304);
  Layout layout{.dims = {64, 1, 1}, .sequence = 2048, .micro_batch = 1, .micro_batches = 2};
  const Cluster cluster = typical_cluster("h100");
  const StepTime whole = step_time(model, layout, cluster);
  layout.shards = 64;
  layout.shard = ShardingStrategy::optimizer;
  EXPECT_LT(step_time(model, layout, cluster).optimizer, whole.optimizer / 60);
  layout.moment = 2;  // each of the two moves 4 bytes less
  EXPECT_NEAR(step_time(model, layout, cluster).optimizer,
              whole.optimizer / 64 * (1 - 8 / cluster.software.optimizer_bytes),
              1e-6 * whole.optimizer);
  layout.moment = 4;
  layout.shard = ShardingStrategy::full_shard;
  const StepTime full = step_time(model, layout, cluster);
  EXPECT_GT(full.gather, 0);
  EXPECT_EQ(whole.gather, 0);
  layout.shards = 8;
  layout.shard = ShardingStrategy::hybrid_shard;
  EXPECT_LT(step_time(model, layout, cluster).gather, full.gather);
}

TEST(StepTime, OffloadIsExposedWhereTheLinkIsSlowerThanThePasses) {
  const ModelShape model = gpt(16, 4096, 32, 50304);
  Layout layout{.sequence = 2048, .micro_batch = 8};
  Cluster cluster = typical_cluster("h100");
  cluster.links.device_link = 1e12;
  const StepTime resident = step_time(model, layout, cluster);
  const double passes = resident.total() - resident.optimizer;
  layout.offload_optimizer = true;
  EXPECT_DOUBLE_EQ(step_time(model, layout, cluster).total(), resident.total());
  cluster.links.device_link = 10 * model.parameters() / (3 * passes);
  EXPECT_NEAR(step_time(model, layout, cluster).optimizer, resident.optimizer + 2 * passes,
              1e-6 * passes);
  layout.offload_optimizer = false;
  layout.offload_grads = true;
  cluster.links.device_link = 1e8;
  EXPECT_GT(step_time(model, layout, cluster).gather, passes);
}

// Long rows, where attention is most of a block: only `full` computes it again.
TEST(StepTime, WhatIsComputedAgainCounts) {
  const ModelShape model = gpt(8, 2048, 16, 50304);
  const Cluster cluster = typical_cluster("h100");
  const auto seconds = [&](Recompute recompute, bool tiles) {
    const Layout layout{
        .sequence = 65536, .micro_batch = 1, .recompute = recompute, .tiles = tiles};
    return step_time(model, layout, cluster).total();
  };
  const double none = seconds(Recompute::none, false), full = seconds(Recompute::full, false);
  const double selective = seconds(Recompute::selective, false);
  EXPECT_GT(selective, none);
  EXPECT_LT(selective - none, 0.2 * (full - none));
  // Tiles compute the MLP and the head again, where nothing else does.
  EXPECT_LT(seconds(Recompute::none, true), full);
  EXPECT_GT(seconds(Recompute::full, true), full);
  EXPECT_LT(seconds(Recompute::full, true) - full, seconds(Recompute::none, true) - none);
  const Layout plain{.sequence = 65536, .micro_batch = 1},
      tiled{.sequence = 65536, .micro_batch = 1, .tiles = true};
  EXPECT_GT(hfu(model, tiled, cluster, 1), hfu(model, plain, cluster, 1));
}

// 8 ranks a host.
TEST(StepTime, GroupsFollowTheOrderOfRanks) {
  using layout::Axis;
  Layout layout{.dims = {4, 8, 2}, .order = Order::tp_fastest};
  EXPECT_EQ(shape_of(layout, Axis::tp, 8), (GroupShape{8, 1}));
  EXPECT_EQ(shape_of(layout, Axis::dp, 8), (GroupShape{4, 4}));
  layout.order = Order::pp_fastest;
  EXPECT_EQ(shape_of(layout, Axis::pp, 8), (GroupShape{2, 1}));
  EXPECT_EQ(shape_of(layout, Axis::tp, 8), (GroupShape{8, 2}));
}

TEST(Collectives, MeasuredTimesCount) {
  Cluster cluster = typical_cluster("h100");
  cluster.links.measured = {{Collective::all_reduce, {8, 1}, 1e6, 1e-4},
                            {Collective::all_reduce, {8, 1}, 1e8, 1e-3}};
  const auto time = [&](GroupShape group, double bytes) {
    return collective_time(cluster, Collective::all_reduce, group, bytes);
  };
  EXPECT_DOUBLE_EQ(time({8, 1}, 1e6), 1e-4);
  EXPECT_DOUBLE_EQ(time({8, 1}, 1e3), 1e-4);
  EXPECT_NEAR(time({8, 1}, 5.05e7), 5.5e-4, 1e-9);
  EXPECT_DOUBLE_EQ(time({8, 1}, 2e8), 2e-3);
  // Another group has the same bus bandwidth: 2 (n - 1) / n of the bytes.
  EXPECT_NEAR(time({4, 1}, 1e8), 1e-3 * 1.5 / 1.75, 1e-9);
  EXPECT_EQ(time({1, 1}, 1e8), 0);
}

// Eight groups of one rank a host share what one group of eight has.
TEST(Collectives, GroupsShareTheNetwork) {
  Cluster cluster = typical_cluster("h100");
  cluster.links.network_latency = cluster.links.host_latency = 0;
  const double alone = collective_time(cluster, Collective::all_gather, {16, 2}, 1e9);
  cluster.links.sharing = 1;
  const double shared = collective_time(cluster, Collective::all_gather, {2, 2}, 1e9);
  EXPECT_NEAR(shared / alone, 8 * 0.5 / (15.0 / 16), 1e-6);
  cluster.links.sharing = 0;
  EXPECT_NEAR(collective_time(cluster, Collective::all_gather, {2, 2}, 1e9) / alone,
              0.5 / (15.0 / 16), 1e-6);
}

TEST(Cluster, UnknownNamesAreRefused) { EXPECT_THROW(typical_cluster("b200"), ConfigError); }

}  // namespace
}  // namespace lockstep::plan
