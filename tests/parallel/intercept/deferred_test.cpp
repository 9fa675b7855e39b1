// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/intercept/deferred.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/types.h>
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/config/model/model_spec.h"
#include "lockstep/core/error.h"
#include "lockstep/model/language_model.h"
#include "lockstep/nn/embedding.h"
#include "lockstep/nn/init_model.h"
#include "lockstep/nn/linear.h"
#include "lockstep/nn/norm.h"
#include "lockstep/parallel/intercept/recording.h"

namespace lockstep::parallel {
namespace {

// Large enough to be without memory.
constexpr int64_t kDeferredWidth = 192;

std::map<std::string, at::Tensor> tensors_of(const torch::nn::Module& module) {
  std::map<std::string, at::Tensor> all;
  for (const auto& item : module.named_parameters()) all[item.key()] = item.value();
  for (const auto& item : module.named_buffers()) all[item.key()] = item.value();
  return all;
}

size_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  size_t size = 0, resident = 0;
  file >> size >> resident;
  return resident * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

// A constructor that does what users do.
struct OwnImpl : torch::nn::Module {
  explicit OwnImpl(int64_t width) {
    scaled = register_parameter("scaled", torch::randn({width, width}) * 0.02);
    shifted = register_parameter("shifted", torch::rand({3, 5}) - 0.5);
    ones = register_parameter("ones", torch::ones({width, width}));
    normal = register_parameter("normal", torch::empty({width, width}));
    torch::nn::init::normal_(normal, 1.0, 0.1);
    inner = register_module("inner", torch::nn::Linear(width, width));
    torch::nn::init::normal_(inner->weight, 0.0, 0.02);
    torch::nn::init::zeros_(inner->bias);
    stripes = register_parameter("stripes", torch::zeros({width, width}));
    {
      torch::NoGradGuard no_grad;
      auto row = stripes[1];
      row.uniform_(2, 3);
      stripes.t()[2].fill_(7);
    }
    mask = register_buffer("mask", torch::tril(torch::ones({width, width})));
    table = register_buffer("table", torch::tensor({1.0, 2.0, 4.0}));
    std::vector<float> numbers{1, 2, 3, 4};
    blob = register_buffer("blob", torch::from_blob(numbers.data(), {2, 2}).clone());
    count = register_buffer("count", torch::tensor(3, torch::kLong));
    steps = register_buffer("steps", torch::arange(width * 400).view({400, width}) * 2);
    eye = register_buffer("eye", torch::eye(width));
    wide = register_buffer("wide", torch::tensor(std::vector<double>(20000, 1.5), torch::kDouble));
    member = torch::full({1, width, width}, -1.5).triu(1);
    frozen = register_parameter("frozen", torch::full({width, width}, 2, torch::kInt), false);
  }
  at::Tensor forward(const at::Tensor& x) {
    return inner(x * count.item<int64_t>() + member[0][0]).matmul(scaled * mask) + normal[0];
  }
  at::Tensor scaled, shifted, ones, normal, stripes, mask, table, blob, count, steps, eye, wide;
  at::Tensor member, frozen;
  torch::nn::Linear inner{nullptr};
};
TORCH_MODULE(Own);

torch::nn::Sequential torch_modules() {
  return torch::nn::Sequential(
      torch::nn::Linear(kDeferredWidth, 2 * kDeferredWidth), torch::nn::Linear(3, 2),
      torch::nn::Embedding(torch::nn::EmbeddingOptions(300, 100).padding_idx(7)),
      torch::nn::LayerNorm(torch::nn::LayerNormOptions({kDeferredWidth, kDeferredWidth})),
      torch::nn::BatchNorm2d(8),
      torch::nn::LSTM(torch::nn::LSTMOptions(kDeferredWidth, kDeferredWidth).num_layers(2)),
      torch::nn::GRU(4, 4), torch::nn::MultiheadAttention(kDeferredWidth, 4),
      torch::nn::TransformerEncoderLayer(
          torch::nn::TransformerEncoderLayerOptions(kDeferredWidth, 4)),
      torch::nn::Conv2d(torch::nn::Conv2dOptions(64, 64, 3)), torch::nn::PReLU(),
      torch::nn::GroupNorm(2, 8));
}

// Same names, shapes, dtypes and flags as in a plain construction, and all of it with memory.
void expect_same_form(const torch::nn::Module& plain, const torch::nn::Module& made) {
  const auto expected = tensors_of(plain), actual = tensors_of(made);
  ASSERT_EQ(expected.size(), actual.size());
  for (const auto& [name, tensor] : expected) {
    const at::Tensor& other = actual.at(name);
    ASSERT_TRUE(other.defined()) << name;
    EXPECT_TRUE(other.is_cpu()) << name;
    EXPECT_EQ(other.sizes(), tensor.sizes()) << name;
    EXPECT_EQ(other.strides(), tensor.strides()) << name;
    EXPECT_EQ(other.scalar_type(), tensor.scalar_type()) << name;
    EXPECT_EQ(other.requires_grad(), tensor.requires_grad()) << name;
    EXPECT_TRUE(other.is_leaf()) << name;
    EXPECT_FALSE(other.grad_fn()) << name;
  }
}

// Constants are the same; what is random has the same mean, deviation and bounds, within what the
// number of elements allows.
void expect_same_values(const torch::nn::Module& plain, const torch::nn::Module& made) {
  const auto actual = tensors_of(made);
  for (const auto& [name, tensor] : tensors_of(plain)) {
    const at::Tensor a = tensor.detach().to(at::kDouble).flatten();
    const at::Tensor b = actual.at(name).detach().to(at::kDouble).flatten();
    ASSERT_TRUE(b.isfinite().all().item<bool>()) << name;
    const double spread = a.numel() > 1 ? a.std().item<double>() : 0;
    if (spread == 0 || !tensor.is_floating_point() || name == "mask" || name == "eye" ||
        name == "table" || name == "blob") {
      EXPECT_TRUE(at::equal(a, b)) << name;
      continue;
    }
    EXPECT_FALSE(at::equal(a, b)) << name;
    if (a.numel() < 500) continue;
    const double allowed = 10 * spread / std::sqrt(static_cast<double>(a.numel()));
    EXPECT_NEAR(a.mean().item<double>(), b.mean().item<double>(), allowed) << name;
    EXPECT_NEAR(spread, b.std().item<double>(), allowed) << name;
    EXPECT_LT(b.abs().max().item<double>(), a.abs().max().item<double>() * 1.5) << name;
  }
}

TEST(Deferred, TorchModulesGetTheirUsualInitialValues) {
  const auto plain = torch_modules();
  const auto model = materialize(deferred(torch_modules), {.seed = 1});
  expect_same_form(*plain, *model);
  expect_same_values(*plain, *model);
  const at::Tensor embedding = model->named_parameters()["2.weight"];
  EXPECT_EQ(embedding[7].abs().max().item<float>(), 0);
  EXPECT_GT(embedding[6].abs().max().item<float>(), 0);
}

TEST(Deferred, UserModulesGetTheirUsualInitialValues) {
  const Own plain(kDeferredWidth);
  const Own model = materialize(deferred([] { return Own(kDeferredWidth); }), {.seed = 1});
  expect_same_form(*plain, *model);
  for (const char* name :
       {"ones", "mask", "table", "blob", "count", "steps", "eye", "wide", "frozen", "inner.bias"}) {
    EXPECT_TRUE(at::equal(tensors_of(*plain)[name], tensors_of(*model)[name])) << name;
  }
  expect_same_values(*plain, *model);
  EXPECT_NEAR(model->scaled.std().item<double>(), 0.02, 1e-3);
  EXPECT_NEAR(model->normal.mean().item<double>(), 1, 1e-2);
  EXPECT_NEAR(model->inner->weight.std().item<double>(), 0.02, 1e-3);
  EXPECT_GE(model->shifted.min().item<double>(), -0.5);
  EXPECT_LT(model->shifted.max().item<double>(), 0.5);
  // Writes to views, in their order.
  EXPECT_EQ(model->stripes[1][2].item<float>(), 7);
  EXPECT_EQ(model->stripes[0][0].item<float>(), 0);
  EXPECT_GE(model->stripes[1].min().item<float>(), 2);
  EXPECT_LE(model->stripes[1][0].item<float>(), 3);
  EXPECT_FALSE(at::equal(model->stripes[1][0], model->stripes[1][1]));
  // A member that is not registered.
  EXPECT_TRUE(at::equal(model->member, plain->member));
}

TEST(Deferred, ValuesAreThoseOfInitialize) {
  // The same distributions, seed and names: the same bits, but for the rounding of bounds.
  const auto make = [] {
    return torch::nn::Sequential(
        torch::nn::Linear(kDeferredWidth, kDeferredWidth), torch::nn::Embedding(300, 100),
        torch::nn::LSTM(torch::nn::LSTMOptions(8, 8)), torch::nn::Conv2d(3, 4, 3),
        torch::nn::Transformer(torch::nn::TransformerOptions(16, 2, 1, 1)));
  };
  const auto model = materialize(deferred(make), {.seed = 3});
  auto other = make();
  lockstep::nn::initialize(*other, 3);
  const auto expected = tensors_of(*other);
  for (const auto& [name, tensor] : tensors_of(*model)) {
    EXPECT_TRUE(at::allclose(tensor, expected.at(name), 1e-5, 1e-7)) << name;
  }
}

TEST(Deferred, SeedAndNameDecide) {
  const auto make = [](uint64_t seed) {
    const auto twins = [] {
      return torch::nn::Sequential(torch::nn::Linear(kDeferredWidth, kDeferredWidth),
                                   torch::nn::Linear(kDeferredWidth, kDeferredWidth),
                                   Own(kDeferredWidth));
    };
    return tensors_of(*materialize(deferred(twins), {.seed = seed}));
  };
  const auto first = make(1), again = make(1), other = make(2);
  for (const auto& [name, tensor] : first) EXPECT_TRUE(at::equal(tensor, again.at(name))) << name;
  for (const char* name : {"0.weight", "0.bias", "2.scaled", "2.shifted", "2.normal"}) {
    EXPECT_FALSE(at::equal(first.at(name), other.at(name))) << name;
  }
  EXPECT_FALSE(at::equal(first.at("0.weight"), first.at("1.weight")));
  EXPECT_FALSE(at::equal(first.at("0.bias"), first.at("1.bias")));
}

TEST(Deferred, GeneratorsOfTorchAreLeftAlone) {
  const auto state = [] { return at::detail::getDefaultCPUGenerator().get_state(); };
  const at::Tensor before = state();
  auto model = deferred([] {
    auto all = std::make_shared<torch::nn::Module>();
    all->register_module("torchs", torch_modules());
    all->register_module("own", Own(kDeferredWidth));
    return all;
  });
  EXPECT_TRUE(at::equal(state(), before));
  materialize(std::move(model));
  EXPECT_TRUE(at::equal(state(), before));
  at::manual_seed(5);
  const at::Tensor one = materialize(deferred([] { return torch::nn::Linear(4, 4); }))->weight;
  at::manual_seed(6);
  const at::Tensor two = materialize(deferred([] { return torch::nn::Linear(4, 4); }))->weight;
  EXPECT_TRUE(at::equal(one, two));
}

TEST(Deferred, ConstructionTakesNoMemory) {
  materialize(deferred(
      [] { return torch::nn::Linear(kDeferredWidth, kDeferredWidth); }));  // what torch loads once
  const size_t before = resident_bytes();
  auto model = deferred([] {
    torch::nn::Sequential layers;
    for (int i = 0; i < 4; ++i) layers->push_back(torch::nn::Linear(8192, 8192));
    return layers;
  });
  EXPECT_LT(resident_bytes(), before + 10'000'000);
  const at::Tensor bias = model.model->named_parameters()["2.bias"];
  const at::Tensor value = model.recording->value(bias, "2.bias", 1, at::kCPU);
  EXPECT_EQ(value.numel(), 8192);
  EXPECT_LT(resident_bytes(), before + 10'000'000);
}

TEST(Deferred, OneRecordedValueIsComputedAlone) {
  auto model = deferred([] { return Own(kDeferredWidth); });
  const at::Tensor scaled = model.model->scaled;
  EXPECT_TRUE(scaled.is_meta());
  EXPECT_TRUE(model.recording->knows(scaled));
  EXPECT_FALSE(model.recording->knows(model.model->table));
  const at::Tensor value = model.recording->value(scaled, "scaled", 1, at::kCPU);
  EXPECT_TRUE(scaled.is_meta());
  EXPECT_TRUE(model.model->normal.is_meta());
  EXPECT_FALSE(value.requires_grad());
  const at::Tensor elsewhere = model.recording->value(scaled, "x.scaled", 1, at::kCPU);
  EXPECT_FALSE(at::equal(value, elsewhere));
  const Own made = materialize(model, {.seed = 1});
  EXPECT_TRUE(at::equal(made->scaled, value));
  EXPECT_TRUE(made->scaled.is_same(scaled));
}

TEST(Deferred, AUserRuleComesFirst) {
  std::vector<std::string> asked;
  const auto rule = [&](const at::Tensor& parameter, const lockstep::nn::init::Source& source) {
    asked.push_back(source.name);
    EXPECT_TRUE(parameter.is_cpu());
    EXPECT_EQ(source.seed, 4);
    if (!source.name.ends_with("weight")) return false;
    lockstep::nn::init::constant_(parameter, 0.25);
    return true;
  };
  const auto make = [] {
    return torch::nn::Sequential(torch::nn::Linear(kDeferredWidth, kDeferredWidth),
                                 torch::nn::LayerNorm(torch::nn::LayerNormOptions({4})));
  };
  const auto model = materialize(deferred(make), {.seed = 4, .rule = rule});
  EXPECT_THAT(asked, testing::ElementsAre("0.weight", "0.bias", "1.weight", "1.bias"));
  const auto all = tensors_of(*model);
  EXPECT_EQ(all.at("0.weight").min().item<float>(), 0.25);
  EXPECT_EQ(all.at("1.weight").max().item<float>(), 0.25);
  EXPECT_GT(all.at("0.bias").std().item<float>(), 0);
  EXPECT_EQ(all.at("1.bias").abs().max().item<float>(), 0);
}

TEST(Deferred, LockstepModulesGetInitialValues) {
  const auto make = [] {
    auto all = std::make_shared<torch::nn::Module>();
    all->register_module("linear", lockstep::nn::Linear(kDeferredWidth, kDeferredWidth));
    all->register_module("embedding", lockstep::nn::Embedding(kDeferredWidth, kDeferredWidth));
    all->register_module("norm", lockstep::nn::LayerNorm(kDeferredWidth));
    return all;
  };
  for (int i = 0; i < 3; ++i) {
    at::full({2, kDeferredWidth, kDeferredWidth}, 3.0);  // memory that others have used
    at::full({kDeferredWidth}, 3.0);
  }
  const auto model = materialize(deferred(make));
  for (const auto& [name, tensor] : tensors_of(*model)) {
    const float value = name == "norm.weight" ? 1 : 0;
    EXPECT_EQ(tensor.min().item<float>(), value) << name;
    EXPECT_EQ(tensor.max().item<float>(), value) << name;
  }
  auto plain = make();
  lockstep::nn::initialize(*plain, 1);
  lockstep::nn::initialize(*model, 1);
  const auto expected = tensors_of(*plain);
  for (const auto& [name, tensor] : tensors_of(*model)) {
    EXPECT_TRUE(at::equal(tensor, expected.at(name))) << name;
  }
}

TEST(Deferred, LanguageModelsComputeTheSame) {
  for (const auto kind : {config::ModelKind::gpt, config::ModelKind::llama}) {
    const auto spec =
        config::ModelSpec{.kind = kind, .layers = 2, .hidden = kDeferredWidth, .heads = 4}.resolved(
            /*seq_len=*/64, /*tokenizer_vocab=*/300);
    const auto make = [&] { return model::LanguageModel(spec); };
    auto plain = make();
    auto built = deferred(make);
    EXPECT_TRUE(built.model->parameters()[0].is_meta());
    auto made = materialize(std::move(built));
    model::initialize(*plain, 9);
    model::initialize(*made, 9);
    const at::Tensor tokens = at::arange(32).view({2, 16});
    plain->eval();
    made->eval();
    EXPECT_TRUE(at::equal(plain->forward(tokens), made->forward(tokens)));
  }
}

TEST(Deferred, MaterialisedModelsTrain) {
  Own model = materialize(deferred([] { return Own(kDeferredWidth); }));
  const at::Tensor x = at::ones({3, kDeferredWidth});
  model->forward(x).square().mean().backward();
  for (const at::Tensor& used : {model->scaled, model->inner->weight, model->normal}) {
    ASSERT_TRUE(used.grad().defined());
    EXPECT_GT(used.grad().abs().max().item<float>(), 0);
    EXPECT_EQ(used.grad().sizes(), used.sizes());
  }
  // The same gradients as of a plain model with these values.
  Own plain(kDeferredWidth);
  {
    const at::NoGradGuard no_grad;
    const auto from = tensors_of(*model);
    for (auto& [name, tensor] : tensors_of(*plain)) tensor.copy_(from.at(name));
  }
  plain->forward(x).square().mean().backward();
  EXPECT_TRUE(at::equal(plain->scaled.grad(), model->scaled.grad()));

  auto layer = materialize(deferred([] {
    return torch::nn::TransformerEncoderLayer(
        torch::nn::TransformerEncoderLayerOptions(kDeferredWidth, 4));
  }));
  layer->forward(at::randn({5, 2, kDeferredWidth})).square().sum().backward();
  for (const at::Tensor& parameter : layer->parameters()) EXPECT_TRUE(parameter.grad().defined());
}

TEST(Deferred, ModulesMayBeConverted) {
  const auto model = materialize(deferred([] {
    torch::nn::Linear linear(kDeferredWidth, kDeferredWidth);
    linear->to(torch::kDouble);
    linear->to(torch::kCPU);
    return linear;
  }));
  EXPECT_EQ(model->weight.scalar_type(), at::kDouble);
  EXPECT_EQ(model->bias.scalar_type(), at::kDouble);
  EXPECT_GT(model->weight.std().item<double>(), 0.01);
  EXPECT_TRUE(model->weight.requires_grad());
}

TEST(Deferred, OrthogonalMatrices) {
  const auto model = materialize(deferred([] {
    torch::nn::Linear linear(kDeferredWidth, kDeferredWidth);
    torch::nn::init::orthogonal_(linear->weight);
    return linear;
  }));
  const at::Tensor& weight = model->weight;
  EXPECT_TRUE(at::allclose(weight.matmul(weight.t()), at::eye(kDeferredWidth), 1e-4, 1e-4));
}

TEST(Deferred, ThreadsBuildForThemselves) {
  const Own expected = materialize(deferred([] { return Own(kDeferredWidth); }), {.seed = 1});
  comm::run_threads(4, [&](const comm::Group& group) {
    for (int i = 0; i < 5; ++i) {
      if (group.rank() == 0) {
        check(at::randn({kDeferredWidth, kDeferredWidth}).is_cpu(),
              "another thread is not in the scope");
        continue;
      }
      const Own own = materialize(deferred([] { return Own(kDeferredWidth); }), {.seed = 1});
      check(at::equal(own->scaled, expected->scaled), "threads draw the same");
    }
  });
}

}  // namespace
}  // namespace lockstep::parallel
