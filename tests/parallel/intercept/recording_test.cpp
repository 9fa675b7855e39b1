// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/intercept/recording.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <cmath>
#include <memory>
#include <stdexcept>

#include "lockstep/core/error.h"
#include "lockstep/nn/init.h"
#include "lockstep/parallel/intercept/deferred.h"
#include "tests/support/says.h"

namespace lockstep::parallel {
namespace {

using test::says;
using testing::HasSubstr;
using testing::ThrowsMessage;

// Large enough to be without memory.
constexpr int64_t kColumns = 192;

TEST(Recording, TwoDrawsAreNotTheSame) {
  struct Net : torch::nn::Module {
    Net() {
      sum = register_parameter(
          "sum", torch::randn({kColumns, kColumns}) + torch::randn({kColumns, kColumns}));
      difference = register_parameter("difference", torch::rand({5}) - torch::rand({5}));
    }
    at::Tensor sum, difference;
  };
  const auto net = materialize(deferred([] { return std::make_shared<Net>(); }));
  EXPECT_NEAR(net->sum.std().item<double>(), std::sqrt(2), 0.05);  // 2 if they were
  EXPECT_GT(net->difference.abs().min().item<float>(), 0);
}

TEST(Recording, CopiesAreCopies) {
  struct Net : torch::nn::Module {
    Net() {
      // The copy comes first in the model's order.
      target = register_module("target", torch::nn::Linear(kColumns, kColumns));
      online = register_module("online", torch::nn::Linear(kColumns, kColumns));
      torch::NoGradGuard no_grad;
      target->weight.copy_(online->weight);
      target->bias.copy_(online->bias);
      at::_foreach_mul_({online->weight, online->bias}, 1.0 / 2);
      norm = register_parameter("norm", online->weight.norm(2, 1, true));
      online->weight.mul_(6);
      cloned = register_module("cloned",
                               std::dynamic_pointer_cast<torch::nn::LinearImpl>(online->clone()));
    }
    torch::nn::Linear target{nullptr}, online{nullptr}, cloned{nullptr};
    at::Tensor norm;
  };
  const auto net = materialize(deferred([] { return std::make_shared<Net>(); }), {.seed = 1});
  EXPECT_TRUE(at::equal(net->online->weight, 3 * net->target->weight));
  EXPECT_TRUE(at::equal(2 * net->online->bias, net->target->bias));
  EXPECT_TRUE(at::equal(net->online->weight, net->cloned->weight));
  EXPECT_TRUE(at::equal(net->norm, (net->target->weight / 2).norm(2, 1, true)));
}

TEST(Recording, ReplayedStepsSeeTheValuesOfTheirTime) {
  struct Net : torch::nn::Module {
    Net() {
      const at::Tensor scratch = torch::randn({kColumns, kColumns});
      const at::Tensor small = torch::full({3}, 2.0);
      both = torch::zeros({kColumns, kColumns});
      both.add_(scratch);
      scratch.fill_(1);
      both.add_(scratch);
      both.narrow(1, 0, 3).copy_(small);
      small.fill_(5);
      both.narrow(1, 3, 3).mul_(0).add_(small);
      register_parameter("both", both);
      scratch.fill_(100);
      // Memory that had values before random numbers came into it.
      mixed = register_parameter("mixed", torch::full({2, 3}, 4.0));
      torch::NoGradGuard no_grad;
      mixed[1].uniform_(-1, 0);
      mixed.mul_(2);
      // What a storage has is not lost where it is filled with itself.
      itself = register_parameter("itself", torch::ones({kColumns, kColumns}));
      itself.copy_(itself);
      // A copy that is none when it is done again on one device.
      copied = mixed.detach().to(torch::kMeta);
      copied.mul_(2).add_(mixed);
      // torch 1.13 has no diag without memory.
      const at::Tensor square = torch::randn({kColumns, kColumns});
      diagonal = torch::zeros({kColumns});
      at::diag_out(diagonal, square);
      rest = square - diagonal.diag();
    }
    at::Tensor both, mixed, itself, copied, diagonal, rest;
  };
  const auto net = materialize(deferred([] { return std::make_shared<Net>(); }));
  const at::Tensor random = net->both.narrow(1, 6, kColumns - 6);
  EXPECT_NEAR(random.mean().item<double>(), 1, 0.05);
  EXPECT_NEAR(random.std().item<double>(), 1, 0.05);
  EXPECT_TRUE(at::equal(net->both.narrow(1, 0, 3), at::full({kColumns, 3}, 2.0)));
  EXPECT_TRUE(at::equal(net->both.narrow(1, 3, 3), at::full({kColumns, 3}, 5.0)));
  EXPECT_TRUE(at::equal(net->mixed[0], at::full({3}, 8.0)));
  EXPECT_LE(net->mixed[1].max().item<float>(), 0);
  EXPECT_GE(net->mixed[1].min().item<float>(), -2);
  EXPECT_EQ(net->itself.min().item<float>(), 1);
  EXPECT_EQ(net->itself.max().item<float>(), 1);
  EXPECT_TRUE(at::equal(net->copied, net->mixed * 3));
  EXPECT_GT(net->diagonal.std().item<float>(), 0.5);
  EXPECT_EQ(net->rest.diagonal().abs().max().item<float>(), 0);
  EXPECT_NEAR(net->rest.std().item<float>(), 1, 0.05);
}

TEST(Recording, SharedMemoryIsShared) {
  struct Net : torch::nn::Module {
    Net() {
      embed = register_module("embed", torch::nn::Embedding(kColumns, kColumns));
      head = register_module(
          "head", torch::nn::Linear(torch::nn::LinearOptions(kColumns, kColumns).bias(false)));
      head->weight = head->register_parameter("tied", embed->weight);
      first_rows = register_buffer("first_rows", embed->weight.detach().narrow(0, 0, 2));
      turned = embed->weight.detach().t();
    }
    torch::nn::Embedding embed{nullptr};
    torch::nn::Linear head{nullptr};
    at::Tensor first_rows, turned;
  };
  const auto net = materialize(deferred([] { return std::make_shared<Net>(); }));
  EXPECT_TRUE(net->head->weight.is_same(net->embed->weight));
  EXPECT_EQ(net->first_rows.data_ptr(), net->embed->weight.data_ptr());
  EXPECT_TRUE(at::equal(net->turned, net->embed->weight.t()));
  EXPECT_EQ(net->turned.data_ptr(), net->embed->weight.data_ptr());
}

// What makes a module of one parameter.
template <class Function>
auto with_parameter(Function function) {
  return [function] {
    auto module = std::make_shared<torch::nn::Module>();
    module->register_parameter("p", function());
    return module;
  };
}

TEST(Recording, WhatCannotBeRecordedIsNamed) {
  const auto item =
      with_parameter([] { return torch::full({3}, torch::randn({1}).item<float>()); });
  EXPECT_THAT([&] { deferred(item); },
              ThrowsMessage<ConfigError>(HasSubstr("operator aten::item needs the values")));
  // Also where there is memory.
  const auto sum = with_parameter([] {
    at::Tensor p = torch::empty({3});
    p.uniform_();
    return p * p.sum().item<float>();
  });
  EXPECT_THAT([&] { deferred(sum); },
              ThrowsMessage<ConfigError>(HasSubstr("operator aten::item needs the values")));
  const auto shape = with_parameter([] { return torch::randn({3}).nonzero().to(torch::kFloat); });
  EXPECT_THAT([&] { deferred(shape); },
              ThrowsMessage<ConfigError>(HasSubstr("operator aten::nonzero needs the values")));
  for (const int64_t size : {int64_t{4}, kColumns}) {
    const auto coin = with_parameter([size] { return torch::zeros({size, size}).bernoulli_(0.5); });
    auto model = deferred(coin);
    EXPECT_THAT([&] { materialize(model); },
                ThrowsMessage<ConfigError>(says("'p' depends ... aten::bernoulli_")));
    const auto rule = [](const at::Tensor& parameter, const lockstep::nn::init::Source&) {
      parameter.fill_(1);
      return true;
    };
    EXPECT_EQ(materialize(model, {.rule = rule})->parameters()[0].min().item<float>(), 1);
  }
}

TEST(Recording, UninitializedMemoryIsNan) {
  const auto model = deferred([] { return torch::nn::Linear(4, 4); });
  EXPECT_TRUE(std::isnan(model.model->weight.data_ptr<float>()[3]));
}

TEST(Recording, ErrorsLeaveTheThreadAsItWas) {
  const auto broken = [] {
    torch::nn::Linear linear(kColumns, kColumns);
    if (linear->weight.is_meta()) throw std::runtime_error("broken");
    return linear;
  };
  EXPECT_THAT([&] { deferred(broken); }, ThrowsMessage<std::runtime_error>("broken"));
  EXPECT_TRUE(at::empty({kColumns, kColumns}).is_cpu());
  const auto nested = [] { return deferred([] { return torch::nn::Linear(2, 2); }).model; };
  EXPECT_THAT([&] { deferred(nested); },
              ThrowsMessage<ConfigError>(HasSubstr("inside another call")));
  EXPECT_TRUE(at::empty({kColumns, kColumns}).is_cpu());
  materialize(deferred([] { return torch::nn::Linear(2, 2); }));
}

TEST(Recording, MemoryMayBePartOfABuffer) {
  auto model = deferred([] { return torch::nn::Linear(kColumns, kColumns); });
  const at::Tensor weight = model.model->weight;
  const at::Tensor flat = at::zeros({kColumns * kColumns + 100});
  const at::Tensor view = flat.narrow(0, 100, kColumns * kColumns).view({kColumns, kColumns});
  view.copy_(model.recording->value(weight, "weight", 1, at::kCPU));
  detail::give_memory(weight, view);
  EXPECT_TRUE(weight.is_leaf() && weight.requires_grad());
  EXPECT_EQ(weight.data_ptr<float>(), flat.data_ptr<float>() + 100);
  at::linear(at::ones({1, kColumns}), weight).sum().backward();
  EXPECT_TRUE(at::equal(weight.grad(), at::ones({kColumns, kColumns})));
}

}  // namespace
}  // namespace lockstep::parallel
