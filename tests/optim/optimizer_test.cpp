// SPDX-License-Identifier: Apache-2.0
// What every optimizer has: construction, groups, gradients, state.
#include "lockstep/optim/optimizer.h"

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <limits>
#include <memory>

#include "lockstep/core/error.h"
#include "lockstep/optim/adamw.h"
#include "lockstep/optim/clip.h"
#include "lockstep/optim/sgd.h"
#include "lockstep/optim/step_guard.h"
#include "tests/optim/optim_support.h"

namespace lockstep::optim {
namespace {

std::vector<std::string> names_of(const auto& tensors) {
  std::vector<std::string> names;
  for (const auto& tensor : tensors) names.push_back(tensor.name);
  return names;
}
using Names = std::vector<std::string>;

struct Model : torch::nn::Module {
  torch::nn::Linear first = register_module("first", torch::nn::Linear(3, 4));
  torch::nn::BatchNorm1d norm = register_module("norm", torch::nn::BatchNorm1d(4));
  at::Tensor tied = register_parameter("tied", first->weight);
  at::Tensor frozen = register_parameter("frozen", at::ones({2, 2}), /*requires_grad=*/false);
};

TEST(Parameters, OfAModule) {
  const Model model;
  const auto parameters = named_parameters(model);
  EXPECT_EQ(names_of(parameters), (Names{"tied", "first.bias", "norm.weight", "norm.bias"}));
  EXPECT_TRUE(parameters[0].tensor.is_same(model.first->weight));
}

TEST(Parameters, VectorsDoNotDecay) {
  const auto groups = decay_groups(Model(), 0.1);
  ASSERT_EQ(groups.size(), 2u);
  EXPECT_EQ(names_of(groups[0].parameters), Names{"tied"});
  EXPECT_EQ(groups[0].weight_decay, 0.1);
  EXPECT_EQ(names_of(groups[1].parameters), (Names{"first.bias", "norm.weight", "norm.bias"}));
  EXPECT_EQ(groups[1].weight_decay, 0);
}

TEST(Optimizer, TrainsAModule) {
  at::manual_seed(3);
  torch::nn::Sequential model(torch::nn::Linear(4, 16), torch::nn::Linear(16, 1));
  const at::Tensor input = at::randn({64, 4}), target = input.sum(1, true);
  AdamW optimizer(*model, {.lr = 1e-2});
  double first = 0, last = 0;
  for (int step = 0; step < 200; ++step) {
    const at::Tensor loss = at::mse_loss(model->forward(input), target);
    last = loss.item<double>();
    if (step == 0) first = last;
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
  }
  EXPECT_LT(last, first / 100);
}

// Gradients in memory, others that operators update, and sparse ones: as after a pass over them.
TEST(Optimizer, AScaledStepIsThatOfScaledGradients) {
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    const auto run = [&](bool scaled) {
      at::manual_seed(4);
      std::vector<NamedParameter> all{{"dense", at::randn({7, 5}).to(type)},
                                      {"gaps", at::randn({7, 10}).to(type).slice(1, 0, 10, 2)},
                                      {"sparse", at::randn({9, 3}).to(type)},
                                      {"none", at::randn({3}).to(type)}};
      for (auto& each : all) each.tensor = each.tensor.detach().requires_grad_();
      AdamW optimizer(all, {.lr = 1e-2});
      for (const double factor : {1.0, 0.3, 2.0}) {
        for (size_t i = 0; i < 2; ++i)
          all[i].tensor.mutable_grad() = at::randn(all[i].tensor.sizes()).to(type);
        all[2].tensor.mutable_grad() = at::sparse_coo_tensor(
            at::tensor({1, 4, 1}, at::kLong).unsqueeze(0), at::randn({3, 3}).to(type), {9, 3});
        if (scaled) {
          optimizer.step_scaled(factor);
        } else {
          const double norm = 1 / factor - 1e-6;  // clips to the factor
          if (factor < 1) clip_grad_with_norm(optimizer.parameters(), 1, norm);
          for (size_t i = 0; i < 3 && factor > 1; ++i) all[i].tensor.mutable_grad().mul_(factor);
          optimizer.step();
        }
      }
      return optimizer.parameters();
    };
    const auto found = run(true), expected = run(false);
    for (size_t i = 0; i < found.size(); ++i)
      EXPECT_TRUE(at::equal(found[i], expected[i])) << c10::toString(type) << " " << i;
  }
}

// A norm above the limit scales the step; gradients of a step that is skipped stay.
TEST(StepGuard, ClipsWhereItSteps) {
  const auto run = [](double norm, double max_norm) {
    const at::Tensor p = at::ones({2}).requires_grad_();
    p.mutable_grad() = at::full({2}, 4.0F);
    SGD optimizer({{"p", p}}, {.lr = 1});
    StepGuard().step(optimizer, norm, max_norm);
    return p.detach()[0].item<float>();
  };
  EXPECT_NEAR(run(8, 2), 0, 1e-5);
  EXPECT_EQ(run(8, 0), -3);
  EXPECT_EQ(run(8, 10), -3);
  EXPECT_EQ(run(std::numeric_limits<double>::infinity(), 1), 1);
}

TEST(Optimizer, ZeroGradMakesGradientsUndefined) {
  const at::Tensor tensor = parameter({2});
  tensor.mutable_grad() = at::ones({2});
  SGD optimizer({{"p", tensor}});
  optimizer.zero_grad();
  EXPECT_FALSE(tensor.grad().defined());
}

TEST(Optimizer, OptionsReachGroupsThatGiveNone) {
  AdamW optimizer({{.parameters = {{"a", parameter({1})}}},
                   {.parameters = {{"b", parameter({1})}}, .weight_decay = 0.5, .lr_scale = 2}},
                  {.lr = 0.25, .weight_decay = 0.1});
  EXPECT_EQ(optimizer.lr(), 0.25);
  EXPECT_EQ(optimizer.groups()[0].weight_decay, 0.1);
  EXPECT_EQ(optimizer.groups()[1].weight_decay, 0.5);
  EXPECT_EQ(optimizer.parameters().size(), 2u);
}

TEST(Optimizer, BadParametersAreNamed) {
  const at::Tensor tensor = parameter({2});
  const auto with = [](std::vector<NamedParameter> parameters) { SGD optimizer(parameters); };
  expect_error<ConfigError>("parameter 'b' is given twice", [&] {
    with({{"a", tensor}, {"b", tensor}});
  });
  expect_error<ConfigError>("parameter 'a' is given twice", [&] {
    with({{"a", tensor}, {"a", parameter({2})}});
  });
  expect_error<ConfigError>("parameter 'i' is Int, must be float64", [&] {
    with({{"i", at::zeros({2}, at::kInt)}});
  });
  expect_error<ConfigError>("parameter 'u' is undefined", [&] { with({{"u", at::Tensor()}}); });
  expect_error<ConfigError>("parameter 'n' ... computed", [&] { with({{"n", tensor * 2}}); });
  SGD optimizer({{"a", tensor}});
  expect_error<ConfigError>("[SGD] lr is nan", [&] { optimizer.set_lr(std::nan("")); });
}

// Every kind of optimizer over the same parameters.
std::unique_ptr<Optimizer> make(const std::string& kind, const std::vector<at::Tensor>& tensors) {
  if (kind == "adamw") return std::make_unique<AdamW>(named(tensors));
  if (kind == "sgd") return std::make_unique<SGD>(named(tensors));
  return std::make_unique<SGD>(named(tensors), SGDOptions{.momentum = 0.9, .dampening = 0.5});
}

class State : public ::testing::TestWithParam<std::string> {
 protected:
  static std::vector<at::Tensor> tensors() {
    return {parameter({4, 3}), parameter({3}), parameter({5}, at::kBFloat16), parameter({2})};
  }
  static void set_some_grads(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
    set_grads(a, b);
    a.back().mutable_grad() = b.back().mutable_grad() = at::Tensor();  // never had a gradient
  }
};

TEST_P(State, RoundTripContinuesBitForBit) {
  const auto first = tensors();
  const auto optimizer = make(GetParam(), first);
  for (int step = 0; step < 5; ++step) {
    set_some_grads(first, first);
    optimizer->step();
  }
  const auto second = copies_of(first);
  const auto resumed = make(GetParam(), second);
  auto saved = optimizer->state();
  for (NamedTensor& item : saved) item.tensor = item.tensor.clone();
  std::reverse(saved.begin(), saved.end());  // any order
  resumed->load_state(saved);
  for (int step = 0; step < 5; ++step) {
    if (step == 3) {
      for (const auto* list : {&first, &second}) (*list)[3].mutable_grad() = at::ones({2});
    } else {
      set_some_grads(first, second);
    }
    optimizer->step();
    resumed->step();
  }
  for (size_t i = 0; i < first.size(); ++i) EXPECT_TRUE(same_bits(first[i], second[i])) << i;
  const auto a = optimizer->state(), b = resumed->state();
  ASSERT_EQ(names_of(a), names_of(b));
  for (size_t i = 0; i < a.size(); ++i)
    EXPECT_TRUE(same_bits(a[i].tensor, b[i].tensor)) << a[i].name;
}

TEST_P(State, StateBeforeTheFirstStepIsInitial) {
  const auto first = tensors(), second = copies_of(first);
  const auto asked = make(GetParam(), first), fresh = make(GetParam(), second);
  for (const auto& [name, tensor] : asked->state()) {
    if (name.ends_with(".master")) {
      EXPECT_TRUE(same_bits(tensor, first[2].to(at::kFloat)));
    } else {
      EXPECT_TRUE(tensor.eq(0).all().item<bool>()) << name;
    }
  }
  set_grads(first, second);
  asked->step();
  fresh->step();
  for (size_t i = 0; i < first.size(); ++i) EXPECT_TRUE(same_bits(first[i], second[i])) << i;
}

TEST_P(State, StateSharesMemoryWithTheOptimizer) {
  const auto parameters = tensors();
  const auto optimizer = make(GetParam(), parameters);
  const auto before = optimizer->state();
  set_grads(parameters, parameters);
  optimizer->step();
  const auto after = optimizer->state();
  for (size_t i = 0; i < before.size(); ++i) {
    EXPECT_EQ(before[i].tensor.data_ptr(), after[i].tensor.data_ptr()) << before[i].name;
  }
}

INSTANTIATE_TEST_SUITE_P(, State, ::testing::Values("adamw", "sgd", "momentum"),
                         [](const auto& info) { return info.param; });

TEST(NamedState, Names) {
  AdamW adamw({{"layer.weight", parameter({2, 2}, at::kBFloat16)}, {"bias", parameter({2})}});
  EXPECT_EQ(names_of(adamw.state()),
            (Names{"layer.weight.exp_avg", "layer.weight.exp_avg_sq", "layer.weight.master",
                   "layer.weight.step", "bias.exp_avg", "bias.exp_avg_sq", "bias.step"}));
  SGD plain({{"a", parameter({2})}, {"b", parameter({2}, at::kHalf)}});
  EXPECT_EQ(names_of(plain.state()), Names{"b.master"});
  SGD momentum({{"a", parameter({2})}}, {.momentum = 0.9});
  EXPECT_EQ(names_of(momentum.state()), (Names{"a.momentum_buffer", "a.step"}));
}

TEST(NamedState, ProblemsAreNamedAndNothingIsLoaded) {
  AdamW optimizer({{"w", parameter({2, 3})}});
  std::vector<NamedTensor> entries = {{"w.exp_avg", at::ones({2, 3})},
                                      {"w.exp_avg_sq", at::ones({3, 2})},
                                      {"v.step", at::zeros({}, at::kLong)}};
  expect_error<ConfigError>(
      "[AdamW.load_state] 'w.exp_avg_sq' has shape (3, 2), must be (2, 3); 'v.step' is unknown; "
      "'w.step' is missing",
      [&] { optimizer.load_state(entries); });
  entries.push_back(entries[0]);
  expect_error<ConfigError>("'w.exp_avg' is given twice", [&] { optimizer.load_state(entries); });
  EXPECT_TRUE(entry(optimizer.state(), "w.exp_avg").eq(0).all().item<bool>());
}

}  // namespace
}  // namespace lockstep::optim
