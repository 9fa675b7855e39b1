// SPDX-License-Identifier: Apache-2.0
// A checkpoint is loaded into a model that is in use: what is computed next has its values on every
// rank, and the caller has nothing to remember.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include <chrono>
#include <optional>
#include <random>
#include <string>
#include <thread>

#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/optim/adamw.h"
#include "lockstep/parallel/data/ddp.h"
#include "tests/parallel/offload/training.h"
#include "tests/parallel/shard/support.h"
#include "tests/support/sampling.h"
#include "tests/support/subprocess.h"

namespace lockstep::test {
namespace {

using checkpoint::slices_of;
using parallel::FullyShardOptions;
using parallel::ShardedModel;
using testing::AllOf;
using testing::Each;
using testing::HasSubstr;

int rounds() { return tests_all() ? 40 : 4; }

struct Form {
  std::string name;
  int ranks = 3;
  FullyShardOptions options = {};
};

std::vector<Form> forms() {
  const auto units = [](Strategy strategy) -> FullyShardOptions {
    return {.strategy = strategy,
            .units = parallel::ByType{{"Layer"}},
            .min_num_params = 100,
            .use_orig_params = true};
  };
  std::vector<Form> all;
  for (const Strategy strategy : kStrategies)
    all.push_back({std::string(name_of(strategy)), 3, units(strategy)});
  all.push_back({"hybrid_shard", 4, units(Strategy::hybrid_shard)});
  all.back().options.hybrid_group_size = 2;
  all.push_back({"flat", 3, units(Strategy::full_shard)});
  all.back().options.use_orig_params = false;
  all.push_back({"offload_to_cpu", 3, units(Strategy::full_shard)});
  all.back().options.offload_to_cpu = true;
  for (const Strategy strategy : {Strategy::full_shard, Strategy::optimizer, Strategy::no_shard}) {
    all.push_back({"bfloat16 " + std::string(name_of(strategy)), 3, units(strategy)});
    all.back().options.mixed_precision.param = at::kBFloat16;
  }
  for (const int ranks : {1, 2}) {
    all.push_back({"offload, " + std::to_string(ranks), ranks, units(Strategy::full_shard)});
    all.back().options.offload =
        layout::OffloadOptions{.param_budget = 64 << 10,
                               .host_budget = 64 << 20,
                               .device_limit = 320 << 10,
                               .host_limit = 64 << 20,
                               .strategy = layout::OffloadStrategy::extreme};
  }
  return all;
}

constexpr int64_t kUsedWidth = 104;

at::Tensor numbers() { return at::arange(6 * kUsedWidth, at::kFloat).view({6, kUsedWidth}); }

// Trains, saves and loads one of two checkpoints in turn, with a random pause of each rank before
// whatever it does; evaluates after each.
void load_in_turn(const Form& form) {
  const TempDir folder;
  comm::run_threads(form.ranks, [&](const comm::Group& group) {
    Tower model(4, kUsedWidth);
    fill_parameters(*model, 3);
    auto sharded = parallel::fully_shard(*model, group, form.options);
    std::unique_ptr<optim::Optimizer> optimizer;
    if (form.options.offload) {
      optimizer =
          std::make_unique<parallel::OffloadedAdamW>(sharded, optim::AdamWOptions{.lr = 0.01});
    } else {
      optimizer = std::make_unique<optim::AdamW>(sharded.named_parameters(),
                                                 optim::AdamWOptions{.lr = 0.01});
    }
    const auto slices = slices_of(sharded), all = checkpoint::state(sharded, *optimizer);
    std::mt19937 random(static_cast<unsigned>(7 + group.rank()));
    const auto pause = [&] {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 4 * (random() % 500)));
    };
    const auto step = [&](int index) {
      pause();
      const at::Tensor input = at::sin(numbers() * (1 + 0.01 * (index + group.rank())));
      (model->forward(input) - at::cos(numbers())).square().mean().backward();
      optimizer->step();
      optimizer->zero_grad();
    };
    const auto evaluate = [&] {
      pause();
      const at::NoGradGuard no_grad;
      return model->forward(at::cos(numbers() * 0.3));
    };
    std::vector<std::string> paths;
    std::vector<at::Tensor> expected;
    for (int i = 0; i < 2; ++i) {
      step(i);
      step(i);
      paths.push_back(checkpoint::save(folder.path(), {.step = 1 + i, .slices = all}, group));
      expected.push_back(evaluate());
    }
    EXPECT_FALSE(at::equal(expected[0], expected[1]));
    for (int round = 0; round < rounds(); ++round) {
      const size_t which = static_cast<size_t>(round) % 2;
      if (round % 3 == 2) step(round);
      evaluate();
      pause();
      if (round % 4 < 2) {
        checkpoint::load(paths[which], slices, group, {.may_ignore = {"optim."}});
      } else {
        checkpoint::load(paths[which], all, group);
      }
      EXPECT_TRUE(at::equal(evaluate(), expected[which])) << form.name << ", round " << round;
      EXPECT_TRUE(at::equal(evaluate(), expected[which]))
          << form.name << ", round " << round << ", again";
    }
  });
}

TEST(LoadUsed, ALoadedShardedModelHasTheNewValuesOnAllRanks) {
  for (const Form& form : forms()) load_in_turn(form);
}

// One row, which one rank has: the others take part.
struct RowImpl : torch::nn::Module {
  at::Tensor weight = register_parameter("weight", at::ones({1, 2000}));
};

TEST(LoadUsed, ARankWithoutShardsMayLoad) {
  const TempDir folder;
  comm::run_threads(3, [&](const comm::Group& group) {
    const auto model = std::make_shared<RowImpl>();
    auto sharded = parallel::fully_shard(*model, group, {.units = parallel::OneUnit{}});
    const std::string path =
        checkpoint::save(folder.path(), {.step = 1, .slices = slices_of(sharded)}, group);
    for (int round = 0; round < rounds(); ++round) {
      sharded.begin_update();
      const at::NoGradGuard no_grad;
      for (const at::Tensor& shard : sharded.parameters()) shard.fill_(2);
      EXPECT_EQ(model->weight.sum().item<double>(), 4000);
      checkpoint::load(path, slices_of(sharded), group);
      EXPECT_EQ(model->weight.sum().item<double>(), 2000);
    }
  });
}

// Without a group each rank reads by itself; ranks of the model wait for each other all the same.
TEST(LoadUsed, RanksMayLoadWithoutAGroup) {
  const TempDir folder;
  comm::run_threads(3, [&](const comm::Group& group) {
    Layers model = LayersTask::make(1), plain = LayersTask::make(1);
    auto sharded = parallel::fully_shard(*model, group, weights_only());
    const auto slices = slices_of(sharded);
    const std::string path = checkpoint::save(folder.path(), {.step = 1, .slices = slices}, group);
    torch::optim::SGD optimizer(sharded.parameters(), 0.5);
    backward(model, 0);
    optimizer.step();
    const at::NoGradGuard no_grad;
    const at::Tensor x = LayersTask::batch(1).input;
    model->forward(x);
    checkpoint::load(path, slices);
    EXPECT_TRUE(at::equal(model->forward(x), plain->forward(x)));
  });
}

// Under DDP each rank has all; what a graph has saved is not silently replaced.
TEST(LoadUsed, AModelUnderDdpMayBeLoaded) {
  const TempDir folder;
  comm::run_threads(2, [&](const comm::Group& group) {
    Layers model = LayersTask::make(1), plain = LayersTask::make(1);
    auto whole = parallel::ddp(model, group);
    const auto slices = slices_of(*model);
    const std::string path = checkpoint::save(folder.path(), {.step = 1, .slices = slices}, group);
    const Batch batch = LayersTask::batch(1);
    torch::optim::SGD optimizer(model->parameters(), 0.5);
    LayersTask::loss(whole.forward(batch.input), batch).backward();
    optimizer.step();
    const at::Tensor loss = LayersTask::loss(model->forward(batch.input), batch);
    checkpoint::load(path, slices, group);
    EXPECT_THROW(loss.backward(), c10::Error);
    const at::NoGradGuard no_grad;
    EXPECT_TRUE(at::equal(model->forward(batch.input), plain->forward(batch.input)));
  });
}

// A sharded model's own parameters are copies that come and go.
TEST(LoadUsed, IntoGatheredCopiesIsRefusedByName) {
  const TempDir folder;
  const auto errors = errors_of(2, [&](const comm::Group& group) {
    Layers model = LayersTask::make(1);
    auto sharded = parallel::fully_shard(*model, group, weights_only());
    const std::string path =
        checkpoint::save(folder.path(), {.step = 1, .slices = slices_of(sharded)}, group);
    backward(model, 0);
    checkpoint::load(path, slices_of(*model), group);
  });
  EXPECT_THAT(errors, Each(HasSubstr("writes into parameter layer0.weight")));
}

}  // namespace
}  // namespace lockstep::test
