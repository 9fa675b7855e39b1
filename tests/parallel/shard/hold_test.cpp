// SPDX-License-Identifier: Apache-2.0
// Parameters that stay gathered for inference, by a budget.
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <string>

#include "lockstep/optim/adamw.h"
#include "lockstep/parallel/offload/offload.h"
#include "lockstep/parallel/pipeline/pipeline.h"
#include "tests/parallel/shard/support.h"

namespace lockstep::test {
namespace {

using parallel::ShardedModel;

constexpr int64_t kLayers = 4;
constexpr int64_t kLayerBytes = LayersImpl::kWidth * LayersImpl::kWidth * 4;

at::Tensor infer(Layers& model) {
  const at::NoGradGuard no_grad;
  return model->forward(LayersTask::batch(0).input);
}

// What the call adds to the number of gathers.
template <class Call>
int64_t gathers(const ShardedModel& sharded, Call call) {
  const int64_t before = sharded.stats().all_gathers;
  call();
  return sharded.stats().all_gathers - before;
}

TEST(Hold, ABudgetDecidesHowOftenUnitsAreGathered) {
  comm::run_threads(2, [](const comm::Group& group) {
    Layers model, plain;
    auto sharded = parallel::fully_shard(*model, group, weights_only());
    sharded.eval();
    const auto forward = [&] { EXPECT_LT(distance(infer(model), infer(plain)), 1e-6); };
    EXPECT_EQ(gathers(sharded, forward), kLayers);

    const int64_t all = kLayers * kLayerBytes;
    EXPECT_FALSE(sharded.hold(all - 1));
    EXPECT_FALSE(sharded.hold(all - group.rank())) << "ranks decide alike";
    for (int i = 0; i < 2; ++i) EXPECT_EQ(gathers(sharded, forward), kLayers);

    EXPECT_EQ(gathers(sharded, [&] { EXPECT_TRUE(sharded.hold(all)); }), kLayers);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(gathers(sharded, forward), 0);
    sharded.reshard();
    EXPECT_EQ(sharded.state("layer0.weight"), parallel::ParameterState::sharded);
    EXPECT_EQ(gathers(sharded, forward), kLayers);
  });
}

// Whatever writes the shards, the next forward has the new values, and they stay.
TEST(Hold, NewValuesAreGatheredAgain) {
  comm::run_threads(2, [](const comm::Group& group) {
    Layers model = LayersTask::make(1), plain = LayersTask::make(1);
    auto sharded = parallel::fully_shard(*model, group, weights_only());
    torch::optim::SGD optimizer(sharded.parameters(), 0.5), reference(plain->parameters(), 0.5);
    ASSERT_TRUE(sharded.hold(kLayers * kLayerBytes));
    const auto expect_seen = [&](const char* what) {
      sharded.eval();
      for (const int64_t expected : {kLayers, int64_t{0}}) {
        const auto forward = [&] { EXPECT_LT(distance(infer(model), infer(plain)), 1e-6) << what; };
        EXPECT_EQ(gathers(sharded, forward), expected) << what;
      }
      sharded.train();
    };
    backward(model, 0);
    backward(plain, 0);
    optimizer.step();
    reference.step();
    expect_seen("a step");

    plain = LayersTask::make(2);
    std::vector<optim::NamedTensor> values;
    for (const auto& item : plain->named_parameters())
      values.push_back({item.key(), item.value().detach()});
    sharded.load_full_state_dict(values);
    expect_seen("a load");

    const at::NoGradGuard no_grad;
    {
      const auto guard = sharded.summon({.write_back = true});
      model->layers[2]->weight.fill_(0.25);
    }
    plain->layers[2]->weight.fill_(0.25);
    expect_seen("a summon");
  });
}

// Parameters on the host. The device has room for all four units, or for three.
TEST(Hold, OffloadedParametersStayWithinTheirBudgets) {
  for (const bool roomy : {true, false}) {
    for (const int ranks : {1, 2}) {
      comm::run_threads(ranks, [&](const comm::Group& group) {
        Layers model = LayersTask::make(1), plain = LayersTask::make(1);
        auto options = weights_only();
        options.use_orig_params = true;
        options.offload =
            parallel::OffloadOptions{.param_budget = roomy ? 64 << 10 : 12 << 10,
                                     .host_budget = 16 << 20,
                                     .device_limit = 256 << 10,
                                     .advanced = {.host_limit = 16 << 20,
                                                  .strategy = parallel::OffloadStrategy::extreme,
                                                  .update_site = parallel::UpdateSite::cpu}};
        auto sharded = parallel::fully_shard(*model, group, options);
        ASSERT_GT(parallel::offload_stats(sharded).params_on_host, 0);
        const auto copied = [&] {
          const int64_t before = parallel::offload_stats(sharded).to_device;
          EXPECT_LT(distance(infer(model), infer(plain)), 1e-6);
          return parallel::offload_stats(sharded).to_device - before;
        };
        sharded.eval();
        EXPECT_GE(copied(), kLayers * kLayerBytes);
        EXPECT_EQ(sharded.hold(1 << 30), roomy);
        EXPECT_EQ(copied() == 0, roomy);
        if (!roomy) return;
        sharded.train();
        parallel::OffloadedAdamW optimizer(sharded, {.lr = 0.01});
        optim::AdamW reference(*plain, {.lr = 0.01});
        backward(model, 0);
        backward(plain, 0);
        optimizer.step();
        reference.step();
        sharded.eval();
        EXPECT_GT(copied(), 0) << "a step";
        EXPECT_EQ(copied(), 0);
        sharded.reshard();
        EXPECT_GE(copied(), kLayers * kLayerBytes);
      });
    }
  }
}

TEST(Hold, StagesOfAPipelineShareTheBudget) {
  comm::run_threads(4, [](const comm::Group& group) {
    std::vector<parallel::Layer> layers;
    for (int i = 0; i < 8; ++i) {
      layers.push_back(parallel::layer("layer" + std::to_string(i), [] {
        return torch::nn::Linear(LayersImpl::kWidth, LayersImpl::kWidth);
      }));
    }
    auto options = weights_only();
    options.use_orig_params = true;
    parallel::Pipeline pipeline(
        layers, mesh::Mesh::parallel(group, {.dp = 2, .pp = 2}),
        {.schedule = parallel::PipelineSchedule::interleaved,
         .microbatches = 2,
         .chunks = 2,
         .data = options,
         .advanced = {.initializer = parallel::MaterializeOptions{.seed = 1}}});
    pipeline.eval();
    const auto outputs = [&] {
      return pipeline.forward([](int i) { return parallel::Tensors{LayersTask::batch(i).input}; },
                              2);
    };
    const auto gathered = [&](const auto& call) {
      const auto count = [&] {
        int64_t sum = 0;
        for (const ShardedModel& stage : pipeline.sharded()) sum += stage.stats().all_gathers;
        return sum;
      };
      const int64_t before = count();
      call();
      return count() - before;
    };
    const auto expected = outputs();
    const auto same = [&] {
      const auto found = outputs();
      ASSERT_EQ(found.size(), expected.size());
      for (size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(found[i][0].equal(expected[i][0]));
    };
    const int64_t mine = 4 * kLayerBytes;  // two stages of two layers
    EXPECT_FALSE(pipeline.hold(mine - (group.rank() == 3 ? 1 : 0))) << "ranks decide alike";
    EXPECT_EQ(gathered(same), 4);
    EXPECT_EQ(gathered([&] { EXPECT_TRUE(pipeline.hold(mine)); }), 4);
    for (int i = 0; i < 2; ++i) EXPECT_EQ(gathered(same), 0);
    for (ShardedModel& stage : pipeline.sharded()) stage.reshard();
    EXPECT_EQ(gathered(same), 4);
  });
}

TEST(Hold, NothingIsGatheredOnOneRank) {
  Layers model;
  auto sharded = parallel::fully_shard(*model, comm::Group(), weights_only());
  EXPECT_TRUE(sharded.hold(0)) << "the parameters are the model's own";
}

}  // namespace
}  // namespace lockstep::test
