// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/dropout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/autograd.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <cmath>
#include <map>
#include <memory>

#include "lockstep/comm/group.h"
#include "lockstep/core/error.h"
#include "tests/support/says.h"

namespace lockstep::nn {
namespace {

using layout::Shape;
using test::says;
using testing::HasSubstr;
using testing::ThrowsMessage;

const RandomKey kKey = random_key(5, "dropout", "layer", {.step = 3, .micro_batch = 1});

std::shared_ptr<RandomContext> context_at(int64_t step, int64_t micro_batch, uint64_t seed = 1) {
  return std::make_shared<RandomContext>(
      RandomContext{.seed = seed, .position = {step, micro_batch}});
}

TEST(Dropout, IsTheFunctionOfKeyAndIndex) {
  for (const double p : {0.1, 0.5, 0.9}) {
    const auto x = at::randn({7, 300});
    const auto y = dropout(x, p, kKey).flatten();
    const auto kept = (x * static_cast<float>(1 / (1 - p))).flatten();
    for (int64_t i = 0; i < y.numel(); ++i) {
      const bool drop =
          random_word(kKey, static_cast<uint64_t>(i)) < static_cast<uint32_t>(p * 0x1p32);
      ASSERT_EQ(y[i].item<float>(), drop ? 0 : kept[i].item<float>());
    }
  }
}

TEST(Dropout, KeepsAsManyAsItShould) {
  const int64_t n = 1'000'000;
  for (const double p : {0.01, 0.1, 0.5, 0.99}) {
    const auto y = dropout(at::ones({n}), p, kKey);
    const auto dropped = static_cast<double>((y == 0).sum().item<int64_t>());
    EXPECT_NEAR(dropped, p * n, 5 * std::sqrt(n * p * (1 - p)));
    EXPECT_NEAR(y.mean().item<double>(), 1, 5 * std::sqrt(p / (1 - p) / n));
  }
}

TEST(Dropout, DropsWhatIsNotFiniteToo) {
  const auto y = dropout(at::full({1000}, std::nanf("")), 0.5, kKey);
  const auto zeros = (y == 0).sum().item<int64_t>();
  EXPECT_GT(zeros, 400);
  EXPECT_EQ(y.isnan().sum().item<int64_t>(), 1000 - zeros);
}

TEST(Dropout, GradientsPassWhereValuesDo) {
  const auto x = at::randn({40, 50}).requires_grad_();
  const auto y = dropout(x, 0.3, kKey);
  const auto gradient = at::randn({40, 50});
  y.backward(gradient);
  EXPECT_TRUE(at::equal(x.grad(), dropout(gradient, 0.3, kKey)));
  EXPECT_TRUE(at::equal(x.grad() == 0, y == 0));
}

// Of an expanded gradient, as sum() gives, and through a gradient of a gradient.
TEST(Dropout, GradientsMayBeOfAnyLayoutAndAreDifferentiable) {
  const auto x = at::randn({40, 50}).requires_grad_();
  const auto sum = dropout(x * x, 0.3, kKey).sum();
  const auto first = torch::autograd::grad({sum}, {x}, {}, true, true)[0];
  const auto mask = dropout(at::ones({40, 50}), 0.3, kKey);
  EXPECT_TRUE(at::allclose(first, 2 * x * mask));
  const auto second = torch::autograd::grad({(dropout(first, 0.5, kKey)).sum()}, {x})[0];
  EXPECT_TRUE(at::allclose(second, 2 * mask * dropout(at::ones({40, 50}), 0.5, kKey)));
}

// The input is freed although the graph lives: nothing of the size of the tensor is saved.
TEST(Dropout, SavesNothingForBackward) {
  auto x = at::randn({1000}).requires_grad_();
  auto hidden = x * 2;
  const c10::weak_intrusive_ptr<c10::StorageImpl> storage(
      c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(hidden.storage().unsafeGetStorageImpl()));
  auto y = dropout(hidden, 0.5, kKey);
  hidden.reset();
  EXPECT_TRUE(storage.expired());
  y.sum().backward();
  EXPECT_TRUE(x.grad().defined());
}

TEST(Dropout, SlicesAreMaskedAsInTheWhole) {
  const auto x = at::randn({6, 10, 8});
  const auto whole = dropout(x, 0.4, kKey);
  const Slice slices[] = {{{6, 10, 8}, {{{2, 5}, {0, 10}, {0, 8}}}},  // rows
                          {{6, 10, 8}, {{{0, 6}, {5, 10}, {0, 8}}}},  // a part of the sequence
                          {{6, 10, 8}, {{{0, 6}, {0, 10}, {3, 5}}}},  // columns
                          {{6, 10, 8}, {{{1, 2}, {4, 9}, {7, 8}}}}};
  for (const auto& slice : slices) {
    auto part = x, expected = whole;
    for (int64_t dim = 0; dim < 3; ++dim) {
      const auto& range = slice.box.ranges[static_cast<size_t>(dim)];
      part = part.narrow(dim, range.begin, range.size());
      expected = expected.narrow(dim, range.begin, range.size());
    }
    part = part.detach().requires_grad_();
    const auto y = dropout(part, 0.4, kKey, slice);
    EXPECT_TRUE(at::equal(y, expected));
    y.sum().backward();
    EXPECT_TRUE(at::equal(part.grad() == 0, expected == 0));
  }
  EXPECT_THROW(dropout(x, 0.4, kKey, slices[0]), ConfigError);
}

TEST(Dropout, MasksAllTypesAlike) {
  const auto x = at::randn({1001});
  const auto mask = dropout(at::ones({1001}), 0.2, kKey) != 0;
  for (const auto dtype : {at::kDouble, at::kHalf, at::kBFloat16}) {
    const auto low = x.to(dtype);
    const auto y = dropout(low, 0.2, kKey);
    EXPECT_EQ(y.scalar_type(), dtype);
    EXPECT_TRUE(at::equal(y != 0, mask));
    const auto wide = dtype == at::kDouble ? low * 1.25 : (low.to(at::kFloat) * 1.25f).to(dtype);
    EXPECT_TRUE(at::equal(y, at::where(mask, wide, at::zeros_like(wide))));
  }
}

TEST(Dropout, BitsDoNotDependOnTheNumberOfThreads) {
  const int before = at::get_num_threads();
  const auto x = at::randn({200'003});
  at::set_num_threads(1);
  const auto alone = dropout(x, 0.5, kKey);
  at::set_num_threads(3);
  EXPECT_TRUE(at::equal(dropout(x, 0.5, kKey), alone));
  at::set_num_threads(before);
}

TEST(Dropout, RefusesWhatIsNoChance) {
  for (const double p : {-0.1, 1.0, 1.5, std::nan("")}) {
    EXPECT_THROW(dropout(at::ones({2}), p, kKey), ConfigError) << p;
    EXPECT_THROW(Dropout{p}, ConfigError) << p;
  }
  EXPECT_THAT([] { dropout(at::ones({2}), 1.5, kKey); },
              ThrowsMessage<ConfigError>(HasSubstr("[dropout] p is 1.5, must be in [0, 1)")));
  EXPECT_THAT([] { dropout(at::ones({2}, at::kInt), 0.5, kKey); },
              ThrowsMessage<ConfigError>(says("dtype is Int ... floating")));
}

// ---- the module ----

TEST(DropoutModule, IsTheIdentityInEvalAndForZero) {
  const auto x = at::randn({10});
  Dropout layer(0.5), none(0.0);  // with no context: they do not draw
  layer->eval();
  EXPECT_TRUE(layer->forward(x).is_same(x));
  EXPECT_TRUE(none->forward(x).is_same(x));
  EXPECT_TRUE(dropout(x, 0, kKey).is_same(x));
}

TEST(DropoutModule, DependsOnSeedNameStepAndMicroBatch) {
  const auto x = at::ones({256});
  const auto mask = [&](uint64_t seed, std::string name, int64_t step, int64_t micro_batch) {
    Dropout layer(0.5, {.name = std::move(name), .context = context_at(step, micro_batch, seed)});
    return layer->forward(x);
  };
  const auto first = mask(1, "a", 2, 3);
  EXPECT_TRUE(at::equal(mask(1, "a", 2, 3), first));
  EXPECT_TRUE(at::equal(first, dropout(x, 0.5, random_key(1, "dropout", "a", {2, 3}))));
  EXPECT_FALSE(at::equal(mask(2, "a", 2, 3), first));
  EXPECT_FALSE(at::equal(mask(1, "b", 2, 3), first));
  EXPECT_FALSE(at::equal(mask(1, "a", 3, 3), first));
  EXPECT_FALSE(at::equal(mask(1, "a", 2, 4), first));
  EXPECT_FALSE(at::equal(mask(1, "a", 3, 2), first));
}

TEST(DropoutModule, FollowsItsContext) {
  const auto x = at::ones({256});
  const auto context = context_at(0, 0);
  Dropout layer(0.5, {.name = "a", .context = context});
  const auto first = layer->forward(x);
  context->position.step = 1;
  const auto second = layer->forward(x);
  context->position.step = 0;
  EXPECT_FALSE(at::equal(first, second));
  EXPECT_TRUE(at::equal(layer->forward(x), first));  // as when a step is computed again
}

// Backward of one micro-batch after the context has moved on to another, as in a pipeline.
TEST(DropoutModule, BackwardRemembersItsPosition) {
  const auto context = context_at(0, 0);
  Dropout layer(0.5, {.name = "a", .context = context});
  const auto x = at::ones({256}).requires_grad_();
  const auto y = layer->forward(x);
  context->position = {.step = 8, .micro_batch = 9};
  y.sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), y));
}

TEST(DropoutModule, NeedsAContextAndAName) {
  EXPECT_THAT([] { Dropout(0.5)->forward(at::ones({2})); },
              ThrowsMessage<ConfigError>(HasSubstr("no RandomContext")));
  EXPECT_THAT([] { Dropout(0.5, {.context = context_at(0, 0)})->forward(at::ones({2})); },
              ThrowsMessage<ConfigError>(HasSubstr("has no name")));
}

TEST(DropoutModule, AttachNamesAllLayersByTheirPaths) {
  torch::nn::Sequential inner(torch::nn::Linear(8, 8), Dropout(0.5));
  torch::nn::ModuleList model(Dropout(0.5), inner);
  const auto context = context_at(0, 0);
  attach_random(*model, context, "stage.");
  std::map<std::string, RandomLayer*> layers;
  for (const auto& module : model->modules()) {
    if (auto* layer = dynamic_cast<RandomLayer*>(module.get())) layers[layer->layer_name] = layer;
  }
  EXPECT_THAT(layers,
              testing::UnorderedElementsAre(testing::Key("stage.0"), testing::Key("stage.1.1")));
  for (const auto& [name, layer] : layers) EXPECT_EQ(layer->context, context);
  EXPECT_EQ(inner->forward(at::ones({4, 8})).sizes(), at::IntArrayRef({4, 8}));
}

TEST(DropoutModule, CloneDrawsTheSameUntilAttachedElsewhere) {
  torch::nn::Sequential model(Dropout(0.5));
  attach_random(*model, context_at(1, 0));
  const auto clone = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(model->clone());
  const auto x = at::ones({256});
  EXPECT_TRUE(at::equal(clone->forward(x), model->forward(x)));
  attach_random(*clone, context_at(2, 0));
  EXPECT_FALSE(at::equal(clone->forward(x), model->forward(x)));
}

TEST(DropoutModule, ForwardOfASliceIsThatOfTheWhole) {
  Dropout layer(0.5, {.name = "a", .context = context_at(1, 2)});
  const auto x = at::randn({4, 6, 8});
  const auto part =
      layer->forward_slice(x.narrow(1, 3, 3), {{4, 6, 8}, {{{0, 4}, {3, 6}, {0, 8}}}});
  EXPECT_TRUE(at::equal(part, layer->forward(x).narrow(1, 3, 3)));
}

// ---- the same with any number of ranks ----

struct NetImpl : torch::nn::Module {
  NetImpl() {
    torch::manual_seed(0);  // weights do not matter here, only that they are the same
    first = register_module("first", torch::nn::Linear(8, 16));
    drop = register_module("drop", Dropout(0.4));
    second = register_module("second", torch::nn::Linear(16, 4));
    last_drop = register_module("last_drop", Dropout(0.2));
  }
  at::Tensor forward(const at::Tensor& x) {
    return last_drop->forward(second->forward(drop->forward(first->forward(x)).relu()));
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
  Dropout drop{nullptr}, last_drop{nullptr};
};
TORCH_MODULE(Net);

at::Tensor micro_batch(int64_t index) {
  return at::arange(24, at::kFloat).reshape({3, 8}).sin() + static_cast<float>(index);
}

TEST(DropoutModule, RanksThatShareTheMicroBatchesDrawAsOneProcess) {
  constexpr int64_t kMicroBatches = 4;
  Net alone;
  const auto context = context_at(0, 0);
  attach_random(*alone, context);
  std::vector<at::Tensor> expected;
  for (int64_t i = 0; i < kMicroBatches; ++i) {
    context->position = {.step = 7, .micro_batch = i};
    expected.push_back(alone->forward(micro_batch(i)));
  }
  std::vector<at::Tensor> actual(kMicroBatches);
  std::vector<Net> models = {Net(), Net()};  // built here: they use torch's generator
  comm::run_threads(2, [&](comm::Group group) {
    auto& model = models[static_cast<size_t>(group.rank())];
    const auto own = context_at(0, 0);
    attach_random(*model, own);
    for (int64_t i = group.rank(); i < kMicroBatches; i += group.size()) {
      own->position = {.step = 7, .micro_batch = i};
      actual[static_cast<size_t>(i)] = model->forward(micro_batch(i));
    }
  });
  for (size_t i = 0; i < kMicroBatches; ++i) EXPECT_TRUE(at::equal(actual[i], expected[i])) << i;
}

TEST(DropoutModule, RanksThatShareTheRowsDrawAsOneProcess) {
  const auto batch = at::arange(10 * 5 * 8, at::kFloat).reshape({10, 5, 8}).cos();
  const auto context = context_at(7, 0);
  Dropout layer(0.5, {.name = "a", .context = context});
  const auto expected = layer->forward(batch);
  for (const layout::Range rows : {layout::Range{0, 3}, {3, 4}, {4, 10}}) {
    context->rows = rows;
    const auto part = batch.narrow(0, rows.begin, rows.size());
    EXPECT_TRUE(at::equal(layer->forward(part), expected.narrow(0, rows.begin, rows.size())));
    const auto flat = part.reshape({-1, 8});  // rows are outermost here too
    EXPECT_TRUE(
        at::equal(layer->forward(flat).view_as(part), expected.narrow(0, rows.begin, rows.size())));
  }
  context->rows = layout::Range{0, 7};
  EXPECT_THAT([&] { layer->forward(at::ones({10})); },
              ThrowsMessage<ConfigError>(HasSubstr("rows 0 to 7 of a batch")));
  context->rows = layout::Range{-1, 1};
  EXPECT_THROW(layer->forward(at::ones({10})), ConfigError);
}

}  // namespace
}  // namespace lockstep::nn
