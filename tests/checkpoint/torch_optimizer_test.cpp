// SPDX-License-Identifier: Apache-2.0
// Programs that train with torch's own optimizers save and go on like others.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim.h>
#include <torch/utils.h>

#include <functional>
#include <memory>
#include <mutex>

#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/core/error.h"
#include "lockstep/parallel/shard/fully_shard.h"
#include "tests/support/subprocess.h"

namespace lockstep::checkpoint {
namespace {

using MakeOptimizer =
    std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;

torch::nn::Sequential make_model() {
  static std::mutex mutex;  // thread ranks share torch's generator
  const std::lock_guard lock(mutex);
  torch::manual_seed(1);
  return torch::nn::Sequential(torch::nn::Linear(6, 5), torch::nn::Tanh(), torch::nn::Linear(5, 3));
}

at::Tensor batch(int step) {
  return at::sin(at::arange(4 * 6, at::kFloat).view({4, 6}) + static_cast<double>(step));
}

struct Case {
  const char* name;
  MakeOptimizer make;
};

template <class Kind, class Options>
Case kind(const char* name, Options options) {
  return {name, [options](std::vector<at::Tensor> parameters) {
            return std::make_unique<Kind>(std::move(parameters), options);
          }};
}

std::vector<Case> cases() {
  using namespace torch::optim;
  return {kind<AdamW>("AdamW", AdamWOptions(0.01)),
          kind<AdamW>("AMSGrad", AdamWOptions(0.01).amsgrad(true)),
          kind<Adam>("Adam", AdamOptions(0.01)),
          kind<SGD>("SGD", SGDOptions(0.01).momentum(0.9)),
          kind<SGD>("PlainSGD", SGDOptions(0.01)),
          kind<RMSprop>("RMSprop", RMSpropOptions(0.01).momentum(0.5).centered(true)),
          kind<Adagrad>("Adagrad", AdagradOptions(0.01).initial_accumulator_value(0.1))};
}

class TorchOptimizer : public testing::TestWithParam<Case> {};

TEST_P(TorchOptimizer, ResumesFromACheckpoint) {
  const test::TempDir folder;
  const auto train = [](torch::nn::Sequential& model, torch::optim::Optimizer& optimizer, int from,
                        int to) {
    for (int step = from; step < to; ++step) {
      optimizer.zero_grad();
      model->forward(batch(step)).square().mean().backward();
      optimizer.step();
    }
  };
  auto model = make_model(), other = make_model();
  const auto optimizer = GetParam().make(model->parameters());
  const auto slices = state(*model, *optimizer);  // once, for all saves
  train(model, *optimizer, 0, 5);
  const std::string path = save(folder.path(), {.step = 5, .slices = slices});
  train(model, *optimizer, 5, 10);
  const auto fresh = GetParam().make(other->parameters());
  load(path, state(*other, *fresh));
  train(other, *fresh, 5, 10);
  for (const auto& item : model->named_parameters())
    EXPECT_TRUE(at::equal(item.value(), other->named_parameters()[item.key()])) << item.key();
}

// From shards of two ranks, which flatten parameters or do not, to three, where a layer was sharded
// alone with options of its own, and to one.
TEST_P(TorchOptimizer, ResumesInOtherShards) {
  const test::TempDir folder;
  const auto run = [&](int ranks, bool original, const std::string& from, int first, int last,
                       bool nested = false) {
    std::vector<at::Tensor> result;
    comm::run_threads(ranks, [&](const comm::Group& group) {
      auto model = make_model();
      if (nested) {
        parallel::fully_shard(
            *model->children()[0], group,
            {.strategy = parallel::ShardingStrategy::optimizer, .min_num_params = 1});
      }
      auto sharded =
          parallel::fully_shard(*model, group, {.min_num_params = 1, .use_orig_params = original});
      const auto optimizer = GetParam().make(sharded.parameters());
      const auto slices = state(sharded, *optimizer);
      if (!from.empty()) load(from, slices, group);
      for (int step = first; step < last; ++step) {
        optimizer->zero_grad();
        model->forward(batch(step)).square().mean().backward();
        optimizer->step();
      }
      save(folder.path(), {.step = last, .slices = state(sharded, *optimizer)}, group);
      const auto all = sharded.full_state_dict();
      if (group.rank() != 0) return;
      for (const auto& item : all) result.push_back(item.tensor);
    });
    return result;
  };
  const auto unbroken = run(1, true, "", 0, 6);
  run(2, false, "", 0, 2);
  run(3, true, folder.path() + "/step-00000002", 2, 4, /*nested=*/true);
  const auto found = run(1, true, folder.path() + "/step-00000004", 4, 6);
  ASSERT_EQ(found.size(), unbroken.size());
  for (size_t i = 0; i < found.size(); ++i)
    EXPECT_TRUE(at::allclose(found[i], unbroken[i], 1e-5, 1e-6)) << i;
}

INSTANTIATE_TEST_SUITE_P(All, TorchOptimizer, testing::ValuesIn(cases()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(TorchOptimizerErrors, NameUnsupportedAndForeignOptimizers) {
  auto model = make_model(), other = make_model();
  torch::optim::LBFGS lbfgs(model->parameters(), torch::optim::LBFGSOptions(1));
  EXPECT_THROW(slices_of(*model, lbfgs), ConfigError);
  torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(1));
  try {
    slices_of(*other, sgd);
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("(5, 6)"));
  }
}

}  // namespace
}  // namespace lockstep::checkpoint
