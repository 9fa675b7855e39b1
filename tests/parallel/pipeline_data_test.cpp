// Pipelines whose stages are shared by data-parallel ranks, whole or sharded.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "tests/parallel/pipeline_training.h"

namespace lockstep::test {
namespace {

using parallel::FullyShardOptions;
using parallel::ParameterState;
using parallel::ShardingStrategy;

const PipelineCurve& one_process(const PipelineCase& c) {
  static std::map<std::string, PipelineCurve> known;
  const std::string key = std::to_string(spec_of(c).layers) + " " + std::to_string(c.total()) +
                          (c.llama ? "l" : "g") + (c.tied ? "t" : "u") +
                          (c.reproducible ? "r" : "");
  const auto found = known.find(key);
  return found != known.end() ? found->second
                              : known.emplace(key, train_one_process(c)).first->second;
}

void expect_close(const std::vector<double>& found, const std::vector<double>& expected,
                  const std::string& what) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i)
    EXPECT_NEAR(found[i], expected[i], 1e-5 * std::abs(expected[i])) << what << " at step " << i;
}

void compare(const PipelineCase& c) {
  SCOPED_TRACE(describe(c) + " at most " + std::to_string(c.max_unsharded));
  const PipelineCurve& expected = one_process(c);
  comm::run_threads(c.ranks * c.dp, [&](const comm::Group& world) {
    const PipelineCurve found = train_pipeline(c, world).curve;
    EXPECT_FALSE(found.weights.empty());
    if (c.reproducible && !c.tied) {
      EXPECT_EQ(found.losses, expected.losses);
      EXPECT_EQ(found.norms, expected.norms);
      for (const auto& [name, tensor] : found.weights)
        EXPECT_TRUE(at::equal(tensor, expected.weights.at(name))) << name;
    } else {
      expect_close(found.losses, expected.losses, "loss");
      expect_close(found.norms, expected.norms, "norm");
      for (const auto& [name, tensor] : found.weights)
        EXPECT_TRUE(at::allclose(tensor, expected.weights.at(name), 0, 1e-4)) << name;
    }
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
          .hybrid_group_size = strategy == ShardingStrategy::hybrid_shard ? 2 : 0,
          .use_orig_params = true,
          .reproducible = reproducible};
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

TEST_P(PipelineData, Ddp) {
  for (const PipelineCase& c : cases(GetParam())) compare(c);
}

TEST_P(PipelineData, EveryStrategy) {
  using enum ShardingStrategy;
  for (PipelineCase c : cases(GetParam())) {
    for (const auto strategy : {full_shard, shard_grad_op, optimizer, no_shard, hybrid_shard}) {
      c.shard = shard_options(strategy, c.reproducible);
      c.dp = strategy == hybrid_shard ? 4 : 2;
      c.microbatches = 8 / c.dp;
      compare(c);
    }
  }
}

TEST_P(PipelineData, HoweverManyAreGathered) {
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

// ---- what is gathered, and when ----

void check_gathers(const PipelineCase& c) {
  SCOPED_TRACE(describe(c) + " at most " + std::to_string(c.max_unsharded));
  comm::run_threads(c.ranks * c.dp, [&](const comm::Group& world) {
    const mesh::Mesh mesh =
        mesh::Mesh::parallel(world, layout::ParallelDims{.dp = c.dp, .tp = 1, .pp = c.ranks});
    const config::ModelSpec spec = spec_of(c);
    parallel::Pipeline pipeline(
        model::language_model_layers(spec, {}, std::make_shared<nn::RandomContext>()), mesh,
        {.schedule = c.schedule,
         .microbatches = c.microbatches,
         .chunks = c.chunks,
         .split = split_of(spec, c.stages()),
         .tied = model::tied_parameters(spec),
         .data = *c.shard,
         .max_unsharded = c.max_unsharded,
         .first_values =
             parallel::MaterializeOptions{.seed = 3, .rule = model::initial_values(spec)}});
    const auto& actions = pipeline.program().actions[static_cast<size_t>(mesh["pp"].rank())];
    const auto count = [&](size_t chunk, schedule::Op op) {
      return std::count(actions.begin(), actions.end(),
                        schedule::Action{op, -1, static_cast<int>(chunk)});
    };
    const auto sharded = pipeline.sharded();
    ASSERT_EQ(sharded.size(), static_cast<size_t>(c.chunks));
    const parallel::PipelineBatch batch{
        .inputs = [&](int i) { return parallel::Tensors{tokens(i, c.device).input}; },
        .loss =
            [&](int i, const parallel::Tensors& outputs) {
              return loss_of(outputs[0], tokens(i, c.device), 1);
            }};
    const auto check_sharded = [&] {
      for (const auto& model : sharded) {
        for (const auto& item :
             pipeline.modules()[static_cast<size_t>(&model - sharded.data())]->named_parameters())
          EXPECT_EQ(model.state(item.key()), ParameterState::sharded) << item.key();
      }
    };
    for (int step = 0; step < 3; ++step) {
      std::vector<int64_t> before;
      for (const auto& model : sharded) before.push_back(model.stats().all_gathers);
      pipeline.step(batch);
      for (size_t chunk = 0; chunk < sharded.size(); ++chunk) {
        const int64_t gathers = sharded[chunk].stats().all_gathers - before[chunk];
        const auto units = static_cast<int64_t>(sharded[chunk].units().size());
        if (c.max_unsharded > 0) {
          EXPECT_EQ(count(chunk, schedule::Op::unshard), count(chunk, schedule::Op::reshard));
          EXPECT_EQ(gathers, count(chunk, schedule::Op::unshard) * units) << chunk;
        } else {
          EXPECT_EQ(count(chunk, schedule::Op::unshard), 0);
          EXPECT_GE(gathers, 2 * c.microbatches * (units - 1)) << chunk;
        }
        // All chunks of a rank fit: once for the whole step.
        if (c.max_unsharded >= c.chunks) {
          EXPECT_EQ(count(chunk, schedule::Op::unshard), 1) << chunk;
        }
      }
      check_sharded();
      for (const at::Tensor& parameter : pipeline.parameters()) {
        EXPECT_TRUE(parameter.grad().defined());
        parameter.mutable_grad().reset();
      }
    }
    pipeline.evaluate(batch, 3);
    check_sharded();
  });
}

TEST(PipelineShards, AreGatheredAsTheProgramSays) {
  for (PipelineCase c : cases(false)) {
    for (const int most : {3, 1, 0}) {
      c.shard = shard_options(ShardingStrategy::full_shard, false);
      c.max_unsharded = most;
      check_gathers(c);
    }
  }
}

}  // namespace
}  // namespace lockstep::test
