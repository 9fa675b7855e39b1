// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/init.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/utils.h>

#include <array>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/nn/init_model.h"
#include "tests/support/says.h"

namespace lockstep::nn {
namespace {

using layout::Placement;
using test::says;
using testing::HasSubstr;
using testing::ThrowsMessage;

at::Tensor normal(const init::Source& source, at::IntArrayRef sizes) {
  auto tensor = at::empty(sizes);
  init::normal_(tensor, source);
  return tensor;
}

TEST(Init, IsAFunctionOfSeedAndName) {
  const auto first = normal({.seed = 1, .name = "a"}, {64});
  EXPECT_TRUE(at::equal(normal({.seed = 1, .name = "a"}, {64}), first));
  EXPECT_FALSE(at::equal(normal({.seed = 2, .name = "a"}, {64}), first));
  EXPECT_FALSE(at::equal(normal({.seed = 1, .name = "b"}, {64}), first));
  const auto key = random_key(1, "init", "a");
  EXPECT_EQ(first[5].item<float>(), lockstep::normal(key, 5));
}

TEST(Init, UsesTheOptions) {
  const init::Source source{.seed = 3, .name = "w"};
  auto w = at::empty({400, 100, 5});  // fan in 500, fan out 2000
  const auto std_is = [&](double std) { EXPECT_NEAR(w.std().item<double>() / std, 1, 0.02); };
  const auto bound_is = [&](double bound) {
    EXPECT_NEAR(w.max().item<double>() / bound, 1, 1e-3);
    EXPECT_NEAR(w.min().item<double>() / bound, -1, 1e-3);
    EXPECT_NEAR(w.mean().item<double>() / bound, 0, 0.01);
  };
  init::normal_(w, source, {.mean = 3, .std = 0.5});
  std_is(0.5);
  EXPECT_NEAR(w.mean().item<double>(), 3, 0.01);
  init::uniform_(w, source, {.low = -2, .high = 2});
  bound_is(2);
  init::trunc_normal_(w, source, {.std = 2, .low = -1, .high = 1});
  EXPECT_LE(w.abs().max().item<double>(), 1);
  init::xavier_normal_(w, source, {.gain = 2});
  std_is(2 * std::sqrt(2.0 / 2500));
  init::xavier_uniform_(w, source);
  bound_is(std::sqrt(6.0 / 2500));
  init::kaiming_normal_(w, source);
  std_is(std::sqrt(2.0 / 500));
  init::kaiming_normal_(w, source, {.gain = 1, .fan = init::Fan::out});
  std_is(std::sqrt(1.0 / 2000));
  init::kaiming_uniform_(w, source);
  bound_is(std::sqrt(6.0 / 500));
  init::constant_(w, 7);
  EXPECT_TRUE(at::equal(w, at::full_like(w, 7)));
}

// Of a (6, 8, 3) tensor cut over two ranks, and the second part once more over two.
TEST(Init, AShardHasItsElementsOfTheWhole) {
  const auto whole = Placement::whole("conv.weight", {6, 8, 3});
  const auto half = whole.narrow(1, {4, 8}, "tp");
  const auto quarter = half.narrow(0, {2, 5}, "dp");
  const auto compare = [&](auto init) {
    auto all = at::empty({6, 8, 3}), shard = at::empty({3, 4, 3});
    init(all, init::Source{.seed = 1, .name = "conv.weight"});
    init(shard, init::Source::of(1, quarter));
    EXPECT_TRUE(at::equal(shard, all.narrow(1, 4, 4).narrow(0, 2, 3)));
  };
  compare([](auto tensor, auto source) { init::normal_(tensor, source); });
  compare([](auto tensor, auto source) { init::uniform_(tensor, source); });
  compare([](auto tensor, auto source) { init::trunc_normal_(tensor, source); });
  compare([](auto tensor, auto source) { init::xavier_normal_(tensor, source); });
  compare([](auto tensor, auto source) { init::xavier_uniform_(tensor, source); });
  compare([](auto tensor, auto source) { init::kaiming_normal_(tensor, source); });
  compare([](auto tensor, auto source) { init::kaiming_uniform_(tensor, source); });
}

TEST(Init, FansNeedTwoDimensions) {
  EXPECT_THAT(
      [] { init::xavier_normal_(at::empty({4}), {.seed = 0, .name = "bias"}); },
      ThrowsMessage<ConfigError>(says("[init] ... 'bias' has shape (4) ... two dimensions")));
}

// ---- initialize ----

// One of each kind that has parameters.
torch::nn::Sequential all_module_kinds() {
  using namespace torch::nn;
  return Sequential(torch::nn::Linear(300, 200), Conv1d(20, 30, 3), Conv2d(20, 30, 3),
                    Conv3d(10, 12, 3), ConvTranspose1d(20, 30, 3), ConvTranspose2d(20, 30, 3),
                    ConvTranspose3d(10, 12, 3), Embedding(EmbeddingOptions(100, 50).padding_idx(7)),
                    EmbeddingBag(100, 50), Bilinear(20, 30, 10), RNN(40, 50), LSTM(40, 50),
                    GRU(40, 50), RNNCell(40, 50), LSTMCell(40, 50), GRUCell(40, 50),
                    LayerNorm(LayerNormOptions({100})), GroupNorm(4, 100), BatchNorm1d(100),
                    BatchNorm2d(100), BatchNorm3d(100),
                    InstanceNorm2d(InstanceNormOptions(100).affine(true)),
                    PReLU(PReLUOptions().num_parameters(9).init(0.3)),
                    MultiheadAttention(MultiheadAttentionOptions(64, 4).add_bias_kv(true)),
                    MultiheadAttention(MultiheadAttentionOptions(64, 4).kdim(40).vdim(50)),
                    Transformer(TransformerOptions(64, 4, 1, 1).dim_feedforward(100)));
}

// Means and deviations of what torch's own constructors draw, over several models.
TEST(Initialize, DrawsFromTorchsDistributions) {
  const auto moments = [](const std::vector<at::Tensor>& draws) {
    const auto all = at::stack(draws).to(at::kDouble);
    return std::array{all.mean().item<double>(), all.std(false).item<double>(),
                      all.abs().max().item<double>()};
  };
  std::map<std::string, std::vector<at::Tensor>> theirs, ours;
  for (uint64_t seed = 0; seed < 8; ++seed) {
    torch::manual_seed(seed);
    auto model = all_module_kinds();
    for (const auto& item : model->named_parameters())
      theirs[item.key()].push_back(item.value().detach().clone());
    initialize(*model, seed);
    for (const auto& item : model->named_parameters())
      ours[item.key()].push_back(item.value().detach().clone());
  }
  ASSERT_GT(ours.size(), 100u);
  for (const auto& [name, draws] : ours) {
    const auto expected = moments(theirs[name]), actual = moments(draws);
    const auto n = static_cast<double>(draws[0].numel() * 8);
    EXPECT_NEAR(actual[0], expected[0], 8 * expected[1] / std::sqrt(n)) << name;
    EXPECT_NEAR(actual[1], expected[1], 5 * expected[1] / std::sqrt(n)) << name;
    // The ends of a uniform distribution are hard; those of a normal one are not.
    EXPECT_NEAR(actual[2], expected[2],
                expected[2] * (expected[2] > 1.9 * expected[1] ? 0.4 : 20 / n))
        << name;
  }
}

TEST(Initialize, DependsOnNamesNotOnOrderOrNeighbours) {
  auto model = all_module_kinds(), other = all_module_kinds();
  torch::randn({100});  // torch's generator does not count
  initialize(*model, 5);
  initialize(*other, 5);
  const auto parameters = model->parameters(), others = other->parameters();
  for (size_t i = 0; i < parameters.size(); ++i) EXPECT_TRUE(at::equal(parameters[i], others[i]));
  // One layer alone, as on a rank that has no other.
  torch::nn::Linear layer(300, 200);
  initialize(*layer, 5, {.prefix = "0."});
  EXPECT_TRUE(at::equal(layer->weight, parameters[0]));
  EXPECT_TRUE(at::equal(layer->bias, parameters[1]));
  initialize(*layer, 6, {.prefix = "0."});
  EXPECT_FALSE(at::equal(layer->weight, parameters[0]));
}

TEST(Initialize, ClearsPadding) {
  torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(10, 4).padding_idx(7));
  torch::nn::EmbeddingBag bag(torch::nn::EmbeddingBagOptions(10, 4).padding_idx(2));
  initialize(*embedding, 1);
  initialize(*bag, 1);
  EXPECT_EQ(embedding->weight[7].abs().max().item<float>(), 0);
  EXPECT_NE(embedding->weight[6].abs().min().item<float>(), 0);
  EXPECT_EQ(bag->weight[2].abs().max().item<float>(), 0);
}

TEST(Initialize, ATensorWithTwoNamesHasTheValuesOfTheFirst) {
  torch::nn::Linear shared(4, 4), alone(4, 4);
  torch::nn::Sequential model(shared, torch::nn::ReLU(), shared);
  initialize(*model, 1);
  initialize(*alone, 1, {.prefix = "0."});
  EXPECT_TRUE(at::equal(shared->weight, alone->weight));
}

struct ScaledImpl : torch::nn::Module {
  ScaledImpl() {
    scale = register_parameter("scale", at::zeros({3}));
    linear = register_module("linear", torch::nn::Linear(3, 3));
  }
  at::Tensor scale;
  torch::nn::Linear linear{nullptr};
};

TEST(Initialize, ParametersOfUnknownModulesNeedARule) {
  torch::nn::ModuleHolder<ScaledImpl> model;
  EXPECT_THAT(
      [&] { initialize(*model, 1, {.prefix = "blocks.2."}); },
      ThrowsMessage<ConfigError>(HasSubstr("[initialize] parameter 'blocks.2.scale' of a")));
  const auto rule = [](const at::Tensor& parameter, const init::Source& source) {
    if (source.name != "scale" && source.name != "linear.bias") return false;
    init::constant_(parameter, 5);
    return true;
  };
  initialize(*model, 1, {.rule = rule});
  EXPECT_TRUE(at::equal(model->scale, at::full({3}, 5.0f)));
  EXPECT_TRUE(at::equal(model->linear->bias, at::full({3}, 5.0f)));
  EXPECT_LT(model->linear->weight.abs().max().item<float>(), 1);
}

TEST(Initialize, ReducedTypesHoldTheRoundedValues) {
  torch::nn::Linear model(16, 16), reduced(16, 16);
  reduced->to(at::kBFloat16);
  initialize(*model, 1);
  initialize(*reduced, 1);
  EXPECT_TRUE(at::equal(reduced->weight, model->weight.to(at::kBFloat16)));
}

}  // namespace
}  // namespace lockstep::nn
