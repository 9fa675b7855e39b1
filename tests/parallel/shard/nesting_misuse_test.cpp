// SPDX-License-Identifier: Apache-2.0
// What is refused of sharded submodules, and of what was returned for them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <mutex>

#include "tests/parallel/shard/nesting.h"
#include "tests/support/says.h"

namespace lockstep::test::nesting {
namespace {

using parallel::fully_shard;
using parallel::FullyShardOptions;
using parallel::Prefetch;
using parallel::ShardedModel;
using testing::AllOf;
using testing::Each;
using testing::HasSubstr;
using testing::IsEmpty;

using Inside = std::function<void(const comm::Group&, Layers)>;

std::vector<std::string> refusals(const Inside& inside, const FullyShardOptions& outer,
                                  int ranks = 2) {
  return errors_of(
      ranks,
      [&](const comm::Group& group) {
        Layers model;
        inside(group, model);
        fully_shard(*model, group, outer);
      },
      kThreads);
}

TEST(Nesting, OptionsOfTheOutermostCallMustNotDiffer) {
  const auto refusal = [](FullyShardOptions inner, FullyShardOptions outer) {
    const auto errors =
        refusals([&](const comm::Group& group,
                     Layers model) { fully_shard(*model->layers[1], group, inner); },
                 outer);
    EXPECT_THAT(errors, Each(errors[0]));
    return errors[0];
  };
  FullyShardOptions inner = one_unit();
  inner.advanced.forward_prefetch = Prefetch::none;
  EXPECT_THAT(refusal(inner, one_unit()),
              AllOf(says("forward_prefetch is none ... submodule 'layer1' ... pre in")));
  FullyShardOptions outer = one_unit();
  outer.advanced.forward_prefetch = Prefetch::none;
  EXPECT_EQ(refusal(inner, outer), "");
  EXPECT_EQ(refusal(one_unit(), outer), "");  // not given: the outermost decides
  inner = one_unit();
  inner.advanced.backward_prefetch = Prefetch::post;
  EXPECT_THAT(refusal(inner, one_unit()), HasSubstr("backward_prefetch is post"));
  inner = one_unit();
  inner.advanced.prefetch_depth = 3;
  EXPECT_THAT(refusal(inner, one_unit()), HasSubstr("prefetch_depth is 3"));
  inner = one_unit();
  inner.advanced.limit_all_gathers = false;
  EXPECT_THAT(refusal(inner, one_unit()), HasSubstr("limit_all_gathers is false"));
  inner = one_unit();
  inner.no_sync = parallel::NoSyncGradients::sharded;
  EXPECT_THAT(refusal(inner, one_unit()), HasSubstr("no_sync is sharded"));
  EXPECT_THAT(
      refusal(one_unit(), one_unit(Strategy::hybrid_shard)),
      says("strategy is full (hybrid_group_size 0) ... 'layer1' and hybrid (hybrid_group_size 2)"));
  inner = one_unit();
  inner.reproducible = true;
  outer = one_unit();
  outer.no_sync = parallel::NoSyncGradients::sharded;
  EXPECT_THAT(refusal(inner, outer), HasSubstr("reproducible and no_sync = sharded"));
  const layout::OffloadOptions tiers{.host_budget = 64 << 20, .advanced = {.host_limit = 64 << 20}};
  inner = one_unit();
  inner.offload = tiers;
  EXPECT_THAT(refusal(inner, one_unit()), AllOf(says("offload is OffloadOptions ... 'layer1'"),
                                                HasSubstr("NoOffload in the model")));
  outer = one_unit();
  outer.offload = tiers;
  EXPECT_THAT(refusal(one_unit(Strategy::optimizer), outer),
              AllOf(HasSubstr("'layer1'"), says("offload ... strategy optimizer")));
  EXPECT_EQ(refusal(one_unit(), outer), "");
}

TEST(Nesting, RanksMustBeTheSame) {
  EXPECT_THAT(refusals(
                  [](const comm::Group& group, Layers model) {
                    const comm::Group half = group.split(group.rank() / 2, group.rank());
                    fully_shard(*model->layers[1], half, one_unit());
                  },
                  one_unit(), 4),
              Each(AllOf(says("'layer1' is sharded"), says("over 0, 1, 2, 3"))));
  // Ranks that differ in what is sharded hear of it.
  EXPECT_THAT(refusals(
                  [](const comm::Group& group, Layers model) {
                    const comm::Group all = group.split(0, group.rank());
                    if (group.rank() == 0) fully_shard(*model->layers[1], comm::Group(), {});
                  },
                  one_unit()),
              Each(HasSubstr("layer1.weight of sharded layer1")));
}

TEST(Nesting, AParameterOfAnotherShardedModelIsRefused) {
  EXPECT_THAT(errors_of(
                  2,
                  [](const comm::Group& group) {
                    Layers model;
                    torch::nn::Linear outside(32, 32);
                    const auto sharded = fully_shard(*outside, group, one_unit());
                    model->layers[2]->register_parameter("other", outside->weight);
                    fully_shard(*model, group, one_unit());
                  },
                  kThreads),
              Each(says("parameter layer2.other ... already part")));
}

TEST(Nesting, AnInnerModelInUseIsRefused) {
  const auto refusal = [](const std::function<void(ShardedModel&, Layers)>& use, int ranks = 2) {
    return errors_of(
        ranks,
        [&](const comm::Group& group) {
          Layers model;
          FullyShardOptions options = one_unit();
          options.min_num_params = 1;
          auto inner = fully_shard(*model->layers[1], group, options);
          const std::string error = error_of([&] { use(inner, model); });
          if (error != "done") throw Error("the use itself failed: " + error);
        },
        kThreads);
  };
  const auto wrap = [](ShardedModel& inner, Layers model) {
    const comm::Group group = inner.shared()->engine->groups().all;
    const std::string error = error_of([&] { fully_shard(*model, group, one_unit()); });
    // Nothing has happened to it.
    model->layers[1](at::ones({2, 32})).sum();
    throw Error(error.empty() ? "taken over" : error);
  };
  const auto message = [&](const std::function<void(ShardedModel&, Layers)>& use) {
    std::vector<std::string> messages;
    std::mutex mutex;
    const auto errors = refusal([&](ShardedModel& inner, Layers model) {
      const std::string error = error_of([&] { use(inner, model); });
      const std::lock_guard lock(mutex);
      messages.push_back(error);
      throw Error("done");
    });
    EXPECT_THAT(errors, Each(IsEmpty()));
    EXPECT_THAT(messages, Each(messages[0]));
    return messages[0];
  };
  const auto run = [](Layers model) { return model->layers[1](at::ones({2, 32})).sum(); };
  EXPECT_THAT(message([&](ShardedModel& inner, Layers model) {
                torch::optim::SGD optimizer(inner.parameters(), 0.1);
                wrap(inner, model);
              }),
              AllOf(says("'layer1' ... an optimizer"), says("make the optimizer")));
  EXPECT_THAT(message([&](ShardedModel& inner, Layers model) {
                const auto held = inner.sharded_state_dict();
                wrap(inner, model);
              }),
              says("state dict ... held"));
  EXPECT_THAT(message([&](ShardedModel& inner, Layers model) {
                run(model).backward();
                wrap(inner, model);
              }),
              says("gradient of 'weight'"));
  EXPECT_THAT(message([&](ShardedModel& inner, Layers model) {
                {
                  const auto later = inner.no_sync();
                  run(model).backward();
                }
                model->zero_grad();
                drop_gradients(model->parameters());
                wrap(inner, model);
              }),
              says("gradient of 'model'"));
  EXPECT_THAT(message([&](ShardedModel& inner, Layers model) {
                const auto later = inner.no_sync();
                wrap(inner, model);
              }),
              HasSubstr("is under no_sync()"));
  EXPECT_THAT(message([&](ShardedModel& inner, Layers model) {
                const auto guard = inner.summon();
                wrap(inner, model);
              }),
              HasSubstr("is under summon()"));
  EXPECT_THAT(message([&](ShardedModel& inner, Layers model) {
                inner.unshard();
                wrap(inner, model);
              }),
              HasSubstr("is under summon() or unshard()"));
}

// What was returned has gone, and the optimizer is still there: it would train nothing. One rank
// has nothing of the parameters, and hears of it too.
TEST(Nesting, AnOptimizerThatOutlivesTheInnerModelIsRefused) {
  EXPECT_THAT(errors_of(
                  3,
                  [](const comm::Group& group) {
                    torch::nn::Sequential model(torch::nn::Linear(2, 2), torch::nn::Linear(2, 2));
                    torch::optim::SGD optimizer(
                        fully_shard(child(*model, "0"), group, shard_all()).parameters(), 0.1);
                    fully_shard(*model, group, shard_all());
                  },
                  kThreads),
              Each(says("'0' ... an optimizer")));
}

TEST(Nesting, WhatAnInnerCallReturnedIsOfNoUseAfterwards) {
  comm::run_threads(
      2,
      [](const comm::Group& group) {
        Layers model;
        auto inner = fully_shard(*model->layers[1], group, one_unit());
        const at::Tensor before = model->layers[1](at::ones({2, 32})).sum();
        const auto sharded = fully_shard(*model, group, one_unit());
        const auto refused = says("fully_shard ... outermost model");
        EXPECT_THAT(error_of([&] { inner.parameters(); }), refused);
        EXPECT_THAT(error_of([&] { inner.grad_norm(); }), refused);
        EXPECT_THAT(error_of([&] { inner.unshard(); }), refused);
        EXPECT_THAT(error_of([&] { auto guard = inner.no_sync(); }), refused);
        EXPECT_THAT(error_of([&] { auto guard = inner.summon(); }), refused);
        EXPECT_THAT(error_of([&] { inner.full_state_dict(); }), refused);
        EXPECT_THAT(error_of([&] { inner.sharded_state_dict(); }), refused);
        EXPECT_THAT(error_of([&] { inner.begin_update(); }), refused);
        EXPECT_THAT(error_of([&] { inner.stats(); }), refused);
        EXPECT_THAT(error_of([&] { inner.units(); }), refused);
        EXPECT_THAT(error_of([&] { inner.eval(); }), refused);
        // A graph from before has the gradients of values that are the same.
        before.backward();
        EXPECT_TRUE(sharded.parameters()[0].grad().defined() ||
                    sharded.parameters()[1].grad().defined());
      },
      kThreads);
}

}  // namespace
}  // namespace lockstep::test::nesting
