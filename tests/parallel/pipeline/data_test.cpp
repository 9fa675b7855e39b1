// SPDX-License-Identifier: Apache-2.0
// Pipelines whose stages are shared by data-parallel ranks, whole or sharded.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "lockstep/schedule/lower.h"
#include "tests/parallel/pipeline/training.h"
#include "tests/support/subprocess.h"

namespace lockstep::test {
namespace {

using parallel::FullyShardOptions;
using parallel::ParameterState;
using parallel::ShardingStrategy;

void compare(const PipelineCase& c) {
  const PipelineCurve& expected = one_process(c);
  comm::run_threads(c.ranks * c.dp, [&](const comm::Group& world) {
    SCOPED_TRACE(describe(c));
    expect_same(c, train_pipeline(c, world).curve, expected);
  });
}

// Blocks, and what comes before and after them.
bool is_unit(const std::string& path, torch::nn::Module&) {
  const std::string blocks = "blocks.";
  if (path.starts_with(blocks)) return path.find('.', blocks.size()) == std::string::npos;
  return path == "embed" || path == "positions" || path == "head";
}

FullyShardOptions shard_options(ShardingStrategy strategy, bool reproducible) {
  return {.strategy = strategy,
          .units = parallel::ByPredicate(is_unit),
          .min_num_params = 1,
          .use_orig_params = true,
          .reproducible = reproducible,
          .advanced = {.hybrid_group_size = strategy == ShardingStrategy::hybrid_shard ? 2 : 0}};
}

std::vector<PipelineCase> cases(bool reproducible) {
  std::vector<PipelineCase> all;
  int number = 0;
  for (const auto& [schedule, chunks] :
       {std::pair(PipelineSchedule::one_f_one_b, 1), std::pair(PipelineSchedule::interleaved, 2),
        std::pair(PipelineSchedule::zb_v, 2)}) {
    for (const bool tied : {false, true}) {
      if (tied && reproducible) continue;
      all.push_back({.schedule = schedule,
                     .ranks = 2,
                     .dp = 2,
                     .chunks = chunks,
                     .microbatches = 4,
                     .llama = number++ % 2 == 0,
                     .tied = tied,
                     .reproducible = reproducible,
                     .steps = 5});
    }
  }
  return all;
}

class PipelineData : public testing::TestWithParam<bool> {};

TEST_P(PipelineData, DdpTrainsAsOneProcess) {
  for (const PipelineCase& c : cases(GetParam())) compare(c);
}

TEST_P(PipelineData, EveryShardingStrategyTrainsAsOneProcess) {
  using enum ShardingStrategy;
  int turn = 0;
  for (PipelineCase c : cases(GetParam())) {
    for (const auto strategy : {full_shard, shard_grad_op, optimizer, no_shard, hybrid_shard}) {
      if (!tests_all() && ++turn % 2 == 0) continue;
      c.shard = shard_options(strategy, c.reproducible);
      c.dp = strategy == hybrid_shard ? 4 : 2;
      c.microbatches = 8 / c.dp;
      compare(c);
    }
  }
}

TEST_P(PipelineData, AnyLimitOnGatheredStagesTrainsAsOneProcess) {
  for (PipelineCase c : cases(GetParam())) {
    for (const int most : {0, 1}) {
      c.shard = shard_options(ShardingStrategy::full_shard, c.reproducible);
      c.max_unsharded = most;
      compare(c);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sums, PipelineData, testing::Bool(),
                         [](const auto& info) { return info.param ? "Reproducible" : "Plain"; });

// Blocks that are computed again, with the dropout that they had.
// Fine-tuning with dropout off is training too.
TEST(PipelineEval, StepsInEvalModeReduceToo) {
  for (const PipelineSchedule schedule : {PipelineSchedule::one_f_one_b, PipelineSchedule::zb_h1}) {
    compare({.schedule = schedule,
             .ranks = 2,
             .dp = 2,
             .microbatches = 2,
             .llama = true,
             .reproducible = true,
             .steps = 3,
             .evals = true});
  }
}

TEST(PipelineRecompute, GivesTheBitsOfOneProcess) {
  using enum PipelineSchedule;
  const TempDir folder;
  for (const auto& [schedule, chunks] : {std::pair(one_f_one_b, 1), std::pair(interleaved, 2),
                                         std::pair(zb_h1, 1), std::pair(zb_v, 2)}) {
    for (const auto recompute : {layout::Recompute::selective, layout::Recompute::full}) {
      for (const bool shards : {false, true}) {
        PipelineCase c{.schedule = schedule,
                       .ranks = 2,
                       .dp = 2,
                       .chunks = chunks,
                       .microbatches = 4,
                       .reproducible = true,
                       .recompute = recompute,
                       .steps = 3};
        if (shards) c.shard = shard_options(ShardingStrategy::full_shard, true);
        if (recompute == layout::Recompute::full && shards == (chunks == 1)) c.disk = folder.path();
        compare(c);
      }
    }
  }
}

// ---- what is gathered, and when ----

parallel::Pipeline make(const PipelineCase& c, const mesh::Mesh& mesh) {
  const config::ModelSpec spec = spec_of(c);
  return {model::language_model_layers(spec, {}, std::make_shared<nn::RandomContext>()),
          mesh,
          {.schedule = c.schedule,
           .microbatches = c.microbatches,
           .chunks = c.chunks,
           .split = split_of(spec, c.stages()),
           .data = *c.shard,
           .advanced = {.max_unsharded = c.max_unsharded,
                        .initializer = parallel::MaterializeOptions{
                            .seed = 3, .rule = model::initial_values(spec)}}}};
}

// Every rank takes the same tokens.
parallel::PipelineBatch batch_from(int first) {
  return {.inputs = [=](int i) { return parallel::Tensors{tokens(first + i, at::kCPU).input}; },
          .loss =
              [=](int i, const parallel::Tensors& outputs) {
                return loss_of(outputs[0], tokens(first + i, at::kCPU), 0.01);
              }};
}

void drop_gradients(const parallel::Pipeline& pipeline) {
  for (const at::Tensor& parameter : pipeline.parameters()) parameter.mutable_grad().reset();
}

void on_mesh(const PipelineCase& c, const std::function<void(const mesh::Mesh&)>& use) {
  comm::run_threads(c.ranks * c.dp, [&](const comm::Group& world) {
    SCOPED_TRACE(describe(c));
    use(mesh::Mesh::parallel(world, {.dp = c.dp, .tp = 1, .pp = c.ranks}));
  });
}

void check_gathers(const PipelineCase& c, const mesh::Mesh& mesh) {
  parallel::Pipeline pipeline = make(c, mesh);
  const auto& actions = pipeline.program().actions[static_cast<size_t>(mesh["pp"].rank())];
  const auto count = [&](size_t chunk, schedule::Op op) {
    return std::count(actions.begin(), actions.end(),
                      schedule::Action{op, -1, static_cast<int>(chunk)});
  };
  const auto sharded = pipeline.sharded();
  ASSERT_EQ(sharded.size(), static_cast<size_t>(c.chunks));
  for (int step = 0; step < 3; ++step) {
    std::vector<int64_t> before;
    for (const auto& model : sharded) before.push_back(model.stats().all_gathers);
    pipeline.step(batch_from(0));
    for (size_t chunk = 0; chunk < sharded.size(); ++chunk) {
      const int64_t gathers = sharded[chunk].stats().all_gathers - before[chunk];
      const auto units = static_cast<int64_t>(sharded[chunk].units().size());
      const auto unshards = count(chunk, schedule::Op::unshard);
      EXPECT_EQ(unshards, count(chunk, schedule::Op::reshard));
      if (c.max_unsharded > 0) {
        // A unit that is fetched for the second half of a backward alone is not used.
        EXPECT_LE(gathers, unshards * units) << chunk;
        EXPECT_GE(gathers, units) << chunk;
      } else {
        EXPECT_EQ(unshards, 0);
        EXPECT_GT(gathers, units) << chunk;
      }
      // All chunks of a rank fit: once for the whole step.
      if (c.max_unsharded >= c.chunks) {
        EXPECT_EQ(unshards, 1) << chunk;
      }
      for (const auto& item : pipeline.modules()[chunk]->named_parameters())
        EXPECT_EQ(sharded[chunk].state(item.key()), ParameterState::sharded) << item.key();
    }
    for (const at::Tensor& parameter : pipeline.parameters())
      EXPECT_TRUE(parameter.grad().defined());
    drop_gradients(pipeline);
  }
}

TEST(PipelineShards, AreGatheredAsTheProgramSays) {
  for (PipelineCase c : cases(false)) {
    for (const int most : {3, 1, 0}) {
      c.shard = shard_options(ShardingStrategy::full_shard, false);
      c.max_unsharded = most;
      on_mesh(c, [&](const mesh::Mesh& mesh) { check_gathers(c, mesh); });
    }
  }
}

void check_accumulation(const PipelineCase& c, const mesh::Mesh& mesh) {
  PipelineCase half = c;
  half.microbatches = c.microbatches / 2;
  parallel::Pipeline whole = make(c, mesh), parts = make(half, mesh);
  for (int step = 0; step < 2; ++step) {
    const at::Tensor losses = whole.step(batch_from(0));
    const at::Tensor first = parts.step(batch_from(0), {.accumulate = true});
    const at::Tensor second = parts.step(batch_from(half.microbatches), {.leave_losses = true});
    EXPECT_TRUE(at::equal(at::cat({first, second}), losses));
    EXPECT_NEAR(parts.grad_norm(), whole.grad_norm(), 1e-5 * whole.grad_norm());
    const auto expected = whole.parameters(), found = parts.parameters();
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i) {
      ASSERT_TRUE(found[i].grad().defined()) << i;
      EXPECT_TRUE(at::allclose(found[i].grad(), expected[i].grad(), 1e-5, 1e-6)) << i;
    }
    drop_gradients(whole);
    drop_gradients(parts);
    whole.evaluate(batch_from(3), 3);  // leaves nothing behind that a step would see
    EXPECT_TRUE(at::equal(parts.evaluate(batch_from(0), 4), parts.evaluate(batch_from(0), 4)));
  }
}

TEST(PipelineShards, StepsThatAccumulateAreOneStep) {
  using enum ShardingStrategy;
  for (PipelineCase c : cases(false)) {
    c.dropout = 0;
    for (const auto& [strategy, most] :
         {std::pair(full_shard, 3), std::pair(full_shard, 0), std::pair(optimizer, 3)}) {
      c.shard = shard_options(strategy, false);
      c.max_unsharded = most;
      on_mesh(c, [&](const mesh::Mesh& mesh) { check_accumulation(c, mesh); });
    }
  }
}

}  // namespace
}  // namespace lockstep::test
