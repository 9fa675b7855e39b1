// SPDX-License-Identifier: Apache-2.0
// The layers of language models, each against the same by plain operators.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/nn/activations.h"
#include "lockstep/nn/attention_heads.h"
#include "lockstep/nn/embedding.h"
#include "lockstep/nn/init.h"
#include "lockstep/nn/init_model.h"
#include "lockstep/nn/linear.h"
#include "lockstep/nn/loss.h"
#include "lockstep/nn/norm.h"

namespace lockstep::nn {
namespace {

bool close(const at::Tensor& a, const at::Tensor& b, double tolerance = 1e-6) {
  return a.sizes() == b.sizes() && at::allclose(a, b, tolerance, tolerance);
}

at::Tensor noise(at::IntArrayRef sizes) {
  at::manual_seed(sizes[0]);
  return at::randn(sizes).set_requires_grad(true);
}

TEST(Layers, LinearAndEmbeddingAreTorchs) {
  Linear linear(6, 4);
  init::normal_(linear->weight, {.seed = 1, .name = "w"});
  init::normal_(linear->bias, {.seed = 1, .name = "b"});
  torch::nn::Linear other(6, 4);
  other->weight.set_data(linear->weight.detach());
  other->bias.set_data(linear->bias.detach());
  const at::Tensor x = noise({3, 5, 6});
  EXPECT_TRUE(close(linear(x), other(x)));
  EXPECT_EQ(Linear(6, 4, {.bias = false})->parameters().size(), 1U);

  Embedding embedding(10, 4);
  init::normal_(embedding->weight, {.seed = 2, .name = "e"});
  const at::Tensor tokens = at::arange(6).view({2, 3});
  EXPECT_TRUE(close(embedding(tokens), embedding->weight.index({tokens})));
}

// Counts the gradients of a leaf that autograd has added, and those that were added for it.
class CountAdditions : public torch::autograd::FunctionPostHook {
 public:
  CountAdditions(int& by_autograd, int& for_it) : by_autograd_(by_autograd), for_it_(for_it) {}
  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& outputs,
      const torch::autograd::variable_list& gradients) override {
    ++(gradients[0].defined() ? by_autograd_ : for_it_);
    return outputs;
  }

 private:
  int &by_autograd_, &for_it_;
};

// Three micro-batches, the second of which uses the layer twice. The sums are those of autograd,
// and the products have added to them in place.
TEST(Layers, GradientsOfWeightsAreAddedByTheirProducts) {
  for (const bool float8 : {false, true}) {
    SCOPED_TRACE(float8);
    const auto train = [&](bool adds, const std::function<void(Linear&, int)>& after) {
      Linear linear(16, 16);
      init::normal_(linear->weight, {.seed = 1, .name = "w"});
      init::normal_(linear->bias, {.seed = 1, .name = "b"});
      linear->float8 = float8;
      linear->adds_gradient = adds;
      int by_autograd = 0, for_it = 0;
      const auto accumulator = torch::autograd::impl::grad_accumulator(linear->weight);
      accumulator->add_post_hook(std::make_unique<CountAdditions>(by_autograd, for_it));
      std::vector<at::Tensor> results;
      for (int i = 0; i < 3; ++i) {
        at::Tensor x = noise({3 + i, 5, 16});
        at::Tensor out = linear(x);
        if (i == 1) out = linear(out);
        results.push_back(out.detach().clone());
        out.square().sum().backward();
        results.push_back(x.grad());
        after(linear, i);
      }
      EXPECT_EQ(by_autograd, adds ? 1 : 3);
      EXPECT_EQ(for_it, adds ? 2 : 0);
      results.push_back(linear->weight.grad());
      results.push_back(linear->bias.grad());
      return results;
    };
    const void* place = nullptr;
    uint32_t version = 0;
    const auto expected = train(false, [](Linear&, int) {});
    const auto found = train(true, [&](Linear& linear, int i) {
      const at::Tensor& sum = linear->weight.grad();
      if (i == 0) place = sum.data_ptr();
      EXPECT_GE(sum._version(), version + (i > 0 ? 1 : 0)) << "autograd sees the writes";
      version = sum._version();
      EXPECT_EQ(sum.data_ptr(), place);
    });
    for (size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(close(found[i], expected[i], 1e-5)) << i;
  }
}

// Where a gradient goes elsewhere than to the sum, autograd takes it there.
TEST(Layers, GradientsThatAreNotOnlyAddedGoThroughAutograd) {
  Linear linear(6, 4, {.bias = false});
  init::normal_(linear->weight, {.seed = 1, .name = "w"});
  linear->adds_gradient = true;
  const at::Tensor x = noise({5, 6});
  const auto loss = [&] { return linear(x).square().sum(); };
  loss().backward();
  const at::Tensor one = linear->weight.grad().clone();
  const auto expect_sum = [&](double times) {
    EXPECT_TRUE(close(linear->weight.grad().to(at::kFloat), one * times, 1e-5)) << times;
  };
  const at::Tensor asked = torch::autograd::grad({loss()}, {linear->weight})[0];
  EXPECT_TRUE(close(asked, one, 1e-5));
  expect_sum(1);

  int seen = 0;
  const auto hook = linear->weight.register_hook([&](const at::Tensor& gradient) {
    ++seen;
    return gradient * 2;
  });
  loss().backward();
  EXPECT_EQ(seen, 1);
  expect_sum(3);
  linear->weight.remove_hook(hook);

  // What prepares for an addition, as the hooks of sharded models do, is called before it.
  class CountGradients : public torch::autograd::FunctionPreHook {
   public:
    explicit CountGradients(int& count) : count_(count) {}
    torch::autograd::variable_list operator()(
        const torch::autograd::variable_list& gradients) override {
      count_ += gradients[0].defined() ? 1 : 0;
      return gradients;
    }

   private:
    int& count_;
  };
  auto accumulator = torch::autograd::impl::grad_accumulator(linear->weight);
  accumulator->add_pre_hook(std::make_unique<CountGradients>(seen));
  loss().backward();
  EXPECT_EQ(seen, 2);
  expect_sum(4);
  linear->weight.mutable_grad().sub_(one);
  accumulator.reset();  // its hooks go with it

  // backward() for one of the inputs alone leaves the weight as it is.
  loss().backward({}, /*retain_graph=*/false, /*create_graph=*/false, std::vector{x});
  expect_sum(3);
  const at::Tensor kept = loss();
  kept.backward({}, /*retain_graph=*/true);
  kept.backward();
  expect_sum(5);

  linear->weight.mutable_grad() = (one * 2).t().contiguous().t();  // not in rows
  loss().backward();
  expect_sum(3);
  linear->weight.mutable_grad() = at::Tensor();
  loss().backward();
  expect_sum(1);
  linear->weight.set_requires_grad(false);
  loss().backward();
  expect_sum(1);
  linear->weight.set_requires_grad(true);
  EXPECT_THROW(loss().backward({}, /*retain_graph=*/true, /*create_graph=*/true), Error);
}

TEST(Layers, InitializeKnowsThem) {
  torch::nn::Module model;
  Linear linear = model.register_module("linear", Linear(16, 8));
  Embedding embedding = model.register_module("embedding", Embedding(10, 4));
  LayerNorm norm = model.register_module("norm", LayerNorm(4));
  RmsNorm rms = model.register_module("rms", RmsNorm(4));
  initialize(model, 3);
  // The distribution of torch's layers: uniform within 1 / sqrt(16), and standard normal.
  EXPECT_LE(linear->weight.abs().max().item<float>(), 0.25F);
  EXPECT_GT(linear->weight.abs().max().item<float>(), 0.2F);
  EXPECT_LE(linear->bias.abs().max().item<float>(), 0.25F);
  EXPECT_GT(embedding->weight.std().item<float>(), 0.5F);
  EXPECT_TRUE(at::equal(rms->weight, at::ones({4})));
  EXPECT_TRUE(at::equal(norm->bias, at::zeros({4})));
}

TEST(Layers, Norms) {
  const at::Tensor x = noise({3, 8});
  const at::Tensor weight = at::linspace(0.5, 2, 8);
  RmsNorm rms(8, {.epsilon = 1e-3});
  rms->weight.set_data(weight);
  const at::Tensor scale = (x.square().mean(1, true) + 1e-3).rsqrt();
  EXPECT_TRUE(close(rms(x), x * scale * weight));
  LayerNorm norm(8, {.epsilon = 1e-3});
  norm->weight.set_data(weight);
  norm->bias.set_data(-weight);
  const at::Tensor centred = x - x.mean(1, true);
  EXPECT_TRUE(
      close(norm(x), centred * (centred.square().mean(1, true) + 1e-3).rsqrt() * weight - weight));
}

TEST(Layers, RmsNormOf16BitsIsTakenInFloat32) {
  RmsNorm norm(256, {.tensors = at::kBFloat16});
  const at::Tensor x = noise({4, 256}).detach().to(at::kBFloat16);
  RmsNorm wide(256);
  EXPECT_TRUE(close(norm(x).to(at::kFloat), wide(x.to(at::kFloat)), 1e-2));
}

// Also where the exponential underflows, overflows or is not a number.
TEST(Layers, Gelu) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
    at::Tensor x = at::cat({at::linspace(-30, 30, 1003), at::tensor({-1e4F, 1e4F, infinity})})
                       .to(type)
                       .set_requires_grad(true);
    at::Tensor y = x.detach().to(at::kDouble, false, true).set_requires_grad(true);
    const at::Tensor found = nn::gelu(x);
    const at::Tensor expected =
        y / 2 * (1 + at::tanh(std::sqrt(2 / M_PI) * (y + 0.044715 * y * y * y)));
    EXPECT_TRUE(close(found.to(at::kDouble), expected));
    found.narrow(0, 0, 1005).sum().backward();
    expected.narrow(0, 0, 1005).sum().backward();
    EXPECT_TRUE(close(x.grad().narrow(0, 0, 1003).to(at::kDouble), y.grad().narrow(0, 0, 1003)));
  }
  EXPECT_TRUE(nn::gelu(at::tensor({NAN, 1.0F}))[0].isnan().item<bool>());
}

TEST(Layers, SecondDerivativesAreRefused) {
  const at::Tensor x = noise({2, 4});
  for (const at::Tensor& y : {nn::gelu(x), swiglu(x)}) {
    EXPECT_THROW(torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true,
                                       /*create_graph=*/true),
                 Error);
  }
}

TEST(Layers, SwiGlu) {
  const at::Tensor x = noise({3, 10});
  const at::Tensor y = noise({3, 10}).detach().set_requires_grad(true);
  const at::Tensor expected = at::silu(y.narrow(1, 0, 5)) * y.narrow(1, 5, 5);
  const at::Tensor found = swiglu(x);
  EXPECT_TRUE(close(found, expected));
  const at::Tensor grad = at::linspace(-1, 2, 15).view({3, 5});
  found.backward(grad);
  expected.backward(grad);
  EXPECT_TRUE(close(x.grad(), y.grad()));
  EXPECT_THROW(static_cast<void>(swiglu(at::zeros({2, 3}))), ConfigError);
}

// Pair i of head h at position t turns by t * frequency[i].
TEST(Layers, HeadsAreSplitAndTurned) {
  const std::vector<double> frequencies{1, 0.25};
  const at::Tensor table = rotary_table(frequencies, 7);
  ASSERT_EQ(table.sizes().vec(), (std::vector<int64_t>{2, 7, 2}));
  const int64_t batch = 2, length = 5, width = 4;
  const at::Tensor qkv = noise({batch, length, (2 + 2 * 1) * width});
  const Heads heads = split_heads(qkv, {.heads = 2, .kv_heads = 1, .rotation = table});
  ASSERT_EQ(heads.q.sizes().vec(), (std::vector<int64_t>{batch, 2, length, width}));
  ASSERT_EQ(heads.v.sizes().vec(), (std::vector<int64_t>{batch, 1, length, width}));
  const auto at_ = [&](int64_t b, int64_t t, int64_t i) { return qkv[b][t][i].item<double>(); };
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t t = 0; t < length; ++t) {
      for (int64_t i = 0; i < width / 2; ++i) {
        const double angle = static_cast<double>(t) * frequencies[static_cast<size_t>(i)];
        const double c = std::cos(angle), s = std::sin(angle);
        for (int64_t h = 0; h < 3; ++h) {
          const at::Tensor& from = h < 2 ? heads.q : heads.k;
          const double x = at_(b, t, h * width + i), y = at_(b, t, h * width + i + 2);
          const at::Tensor row = from[b][h % 2][t];
          EXPECT_NEAR(row[i].item<double>(), x * c - y * s, 1e-5);
          EXPECT_NEAR(row[i + 2].item<double>(), y * c + x * s, 1e-5);
        }
        EXPECT_EQ(heads.v[b][0][t][i].item<double>(), at_(b, t, 3 * width + i));
      }
    }
  }
  // Turning keeps lengths, so the gradient of half the squared length is the tensor itself.
  ((heads.q.square().sum() + heads.k.square().sum() + heads.v.square().sum()) / 2).backward();
  EXPECT_TRUE(close(qkv.grad(), qkv, 1e-5));
}

// One pass over the heads computes what operators do, to the bit, and so does its backward.
TEST(Layers, HeadsAreTurnedAsByOperators) {
  const std::vector<double> frequencies{1, 0.5, 0.25, 0.125, 0.1, 0.01};
  const int64_t batch = 2, length = 150, heads = 6, width = 12, half = width / 2;
  const at::Tensor table = rotary_table(frequencies, length + 3);
  const at::Tensor qkv = noise({batch, length, (heads + 2 * 2) * width});
  const Heads found = split_heads(qkv, {.heads = heads, .kv_heads = 2, .rotation = table});

  const at::Tensor x = qkv.detach().clone().set_requires_grad(true);
  const auto parts = x.view({batch, length, -1, width}).transpose(1, 2).split({heads, 2, 2}, 1);
  const at::Tensor cosine = table[0].narrow(0, 0, length), sine = table[1].narrow(0, 0, length);
  const auto turned = [&](const at::Tensor& part) {
    const auto ab = part.split(half, 3);
    return at::cat({ab[0] * cosine - ab[1] * sine, ab[1] * cosine + ab[0] * sine}, 3);
  };
  const std::vector<at::Tensor> ours{found.q, found.k, found.v},
      expected{turned(parts[0]), turned(parts[1]), parts[2]};
  std::vector<at::Tensor> gradients;
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(at::equal(ours[i], expected[i])) << i;
    // As attention may leave them: (B, T, n, D) in memory, and k's with gaps.
    const auto sizes = ours[i].sizes();
    const at::Tensor wide = noise({batch, length, sizes[1], i == 1 ? 2 * width : width}).detach();
    gradients.push_back((i == 1 ? wide.slice(3, 0, 2 * width, 2) : wide).transpose(1, 2));
  }
  torch::autograd::backward(ours, gradients);
  torch::autograd::backward(expected, gradients);
  EXPECT_TRUE(at::equal(qkv.grad(), x.grad()));
}

TEST(Layers, HeadsThatDoNotFitAreRefused) {
  EXPECT_THROW(split_heads(at::zeros({1, 2, 10}), {.heads = 2, .kv_heads = 1}), ConfigError);
  const std::vector<double> frequencies{1, 2};
  EXPECT_THROW(split_heads(at::zeros({1, 9, 16}),
                           {.heads = 2, .kv_heads = 1, .rotation = rotary_table(frequencies, 8)}),
               ConfigError);
}

TEST(Layers, CrossEntropyCountsWhatCounts) {
  const at::Tensor logits = noise({5, 7});
  const at::Tensor targets = at::tensor({3, -100, 6, 0, -100}, at::kLong);
  const at::Tensor loss = cross_entropy(logits, targets, {.scale = 0.5});
  const at::Tensor logs = logits.log_softmax(1);
  EXPECT_NEAR(loss.item<double>(), -0.5 * (logs[0][3] + logs[2][6] + logs[3][0]).item<double>(),
              1e-5);
  loss.backward();
  at::Tensor expected = logits.softmax(1).detach();
  for (const auto& [row, target] : {std::pair{0, 3}, {2, 6}, {3, 0}}) expected[row][target] -= 1;
  expected[1].zero_();
  expected[4].zero_();
  EXPECT_TRUE(close(logits.grad(), expected * 0.5));
  EXPECT_THROW(static_cast<void>(cross_entropy(logits, targets.narrow(0, 0, 4))), ConfigError);
}

}  // namespace
}  // namespace lockstep::nn
