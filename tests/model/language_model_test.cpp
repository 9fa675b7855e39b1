// SPDX-License-Identifier: Apache-2.0
#include "lockstep/model/language_model.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/nn/loss.h"
#include "tests/support/subprocess.h"

namespace lockstep::model {
namespace {

using config::ModelKind;
using config::ModelSpec;
using layout::Recompute;
using testing::HasSubstr;

ModelSpec small(ModelKind kind) {
  ModelSpec spec{.kind = kind, .layers = 2, .hidden = 32, .heads = 4, .dropout = 0.1};
  if (kind == ModelKind::llama) spec.kv_heads = 2;
  return spec.resolved(/*seq_len=*/16, /*tokenizer_vocab=*/50);
}

// gpt, llama, and llama with the options of the other families.
std::vector<ModelSpec> every() {
  std::vector<ModelSpec> all{small(ModelKind::gpt), small(ModelKind::llama)};
  all.insert(all.end(), 3, all.back());
  all[2].window = 5;
  all[3].qkv_bias = true;
  all[4].qk_norm = true;
  all[4].head_dim = 12;
  return all;
}

at::Tensor some_tokens(int64_t rows = 3, int64_t length = 16) {
  return at::arange(rows * length).remainder(47).view({rows, length});
}

TEST(LanguageModel, HasTheTensorsOfItsSpec) {
  for (ModelSpec spec : every()) {
    for (const bool tied : {false, true}) {
      spec.tied = tied;
      LanguageModel model(spec);
      std::vector<std::string> names, expected;  // in order: who owns which tensor depends on it
      int64_t count = 0;
      for (const auto& item : model->named_parameters()) {
        names.push_back(item.key());
        count += item.value().numel();
      }
      for (const auto& tensor : spec.tensors()) expected.push_back(tensor.name);
      EXPECT_EQ(names, expected);
      EXPECT_EQ(count, spec.parameters());
    }
  }
}

TEST(LanguageModel, InitialValuesAreFunctionsOfSeedAndName) {
  LanguageModel a(small(ModelKind::llama)), b(small(ModelKind::llama));
  initialize(*a, 7);
  at::manual_seed(99);
  initialize(*b, 7);
  for (const auto& item : a->named_parameters()) {
    EXPECT_TRUE(at::equal(item.value(), b->named_parameters()[item.key()])) << item.key();
  }
  initialize(*b, 8);
  EXPECT_FALSE(at::equal(a->parameters()[0], b->parameters()[0]));
  EXPECT_NEAR(a->named_parameters()["blocks.0.attention.qkv.weight"].std().item<double>(), 0.02,
              0.002);
  EXPECT_NEAR(a->named_parameters()["blocks.1.mlp.down.weight"].std().item<double>(), 0.01, 0.001);
}

// No position sees a later one.
TEST(LanguageModel, IsCausal) {
  for (const ModelSpec& spec : every()) {
    LanguageModel model(spec);
    initialize(*model, 1);
    model->eval();
    const at::Tensor tokens = some_tokens(1);
    at::Tensor changed = tokens.clone();
    changed[0][9] = 48;
    const at::Tensor before = model->forward(tokens), after = model->forward(changed);
    EXPECT_TRUE(at::equal(before.narrow(1, 0, 9), after.narrow(1, 0, 9)));
    EXPECT_FALSE(at::allclose(before.narrow(1, 9, 7), after.narrow(1, 9, 7)));
  }
}

// Two layers with a window of 5 see 8 positions back, and no further.
TEST(LanguageModel, AWindowEnds) {
  LanguageModel model(every()[2]);
  initialize(*model, 1);
  model->eval();
  const at::Tensor tokens = some_tokens(1);
  at::Tensor changed = tokens.clone();
  changed[0][2] = 48;
  const at::Tensor before = model->forward(tokens), after = model->forward(changed);
  EXPECT_TRUE(at::equal(before.narrow(1, 11, 5), after.narrow(1, 11, 5)));
  EXPECT_FALSE(at::equal(before.narrow(1, 10, 1), after.narrow(1, 10, 1)));
}

std::vector<at::Tensor> gradients(const ModelSpec& spec, LanguageModelOptions options) {
  LanguageModel model(spec, std::move(options));
  initialize(*model, 1);
  model->random() = {.seed = 5, .position = {.step = 2, .micro_batch = 1}};
  const at::Tensor tokens = some_tokens();
  const at::Tensor loss =
      nn::cross_entropy(model->forward(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten());
  model->random().position = {.step = 2, .micro_batch = 2};  // as a pipeline would be further
  loss.backward();
  std::vector<at::Tensor> all;
  for (const at::Tensor& parameter : model->parameters()) all.push_back(parameter.grad());
  return all;
}

TEST(LanguageModel, RecomputationDoesNotChangeABit) {
  // Some libtorch can multiply bfloat16 matrices only so.
  const bool before = at::globalContext().userEnabledMkldnn();
  at::globalContext().setUserEnabledMkldnn(false);
  const test::TempDir folder;
  for (const ModelSpec& spec : every()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      const auto expected = gradients(spec, {.tensors = dtype});
      for (const Recompute recompute : {Recompute::selective, Recompute::full}) {
        for (const bool on_disk : {false, true}) {
          const auto store =
              on_disk ? std::make_shared<parallel::ActivationStore>(folder.path()) : nullptr;
          const auto found =
              gradients(spec, {.tensors = dtype, .recompute = recompute, .store = store});
          ASSERT_EQ(found.size(), expected.size());
          for (size_t i = 0; i < found.size(); ++i)
            EXPECT_TRUE(at::equal(found[i], expected[i])) << i;
          if (!store) continue;
          const memory::DiskStoreStats stats = store->stats();
          EXPECT_EQ(stats.ahead + stats.late + stats.from_memory, 2U);  // one of each block
        }
      }
    }
  }
  at::globalContext().setUserEnabledMkldnn(before);
}

TEST(LanguageModel, DropoutIsThatOfThePosition) {
  LanguageModel model(small(ModelKind::gpt));
  initialize(*model, 1);
  const at::Tensor tokens = some_tokens();
  const auto at_micro_batch = [&](uint32_t i) {
    model->random().position = {.step = 0, .micro_batch = i};
    return model->forward(tokens);
  };
  const at::Tensor first = at_micro_batch(0);
  EXPECT_FALSE(at::equal(first, at_micro_batch(1)));
  EXPECT_TRUE(at::equal(first, at_micro_batch(0)));
  model->eval();
  EXPECT_TRUE(at::equal(at_micro_batch(0), at_micro_batch(1)));
}

TEST(LanguageModel, TooLongASequenceIsRefused) {
  LanguageModel model(small(ModelKind::gpt));
  try {
    model->forward(some_tokens(1, 17));
    FAIL() << "no error";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("at most 16"));
  }
}

// Logits of another implementation, from weights in a Hugging Face folder.
TEST(LanguageModel, AgreesWithAPlainStatementInPyTorch) {
  const test::TempDir folder;
  const std::vector<std::string> one_thread{"OMP_NUM_THREADS=1"};
  test::Subprocess python(
      {LOCKSTEP_PYTHON_WITH_TORCH, LOCKSTEP_SOURCE_DIR "/tests/model/reference.py", folder.path()},
      one_thread);
  const auto made = python.wait(milliseconds{120'000});
  ASSERT_EQ(made.code, 0) << made.err;
  for (const std::string family : {"gpt2", "llama", "llama3", "mistral", "qwen2", "qwen3"}) {
    test::Subprocess compare(
        {LOCKSTEP_TEST_BIN "/model_logits", folder.path() + "/" + family, "1e-5"}, one_thread);
    const auto result = compare.wait(milliseconds{60'000});
    EXPECT_EQ(result.code, 0) << family << ": " << result.out << result.err;
  }
}

TEST(Generate, IsAFunctionOfTheSeedAndEndsWhenTold) {
  LanguageModel model(small(ModelKind::llama));
  initialize(*model, 1);
  const auto text = [&](const GenerateOptions& options) {
    std::vector<int64_t> tokens;
    generate(*model, {1, 2, 3}, options, [&](int64_t token) {
      tokens.push_back(token);
      return tokens.size() < 30;
    });
    return tokens;
  };
  const auto first = text({.tokens = 20});  // longer than the model's positions with the prompt
  EXPECT_EQ(first.size(), 20U);
  EXPECT_EQ(first, text({.tokens = 20}));
  EXPECT_NE(first, text({.tokens = 20, .seed = 2}));
  EXPECT_EQ(text({.tokens = 100}).size(), 30U);
  EXPECT_EQ(text({.tokens = 20, .temperature = 0}), text({.tokens = 20, .top_k = 1}));
  EXPECT_THROW(generate(*model, {}, {}, [](int64_t) { return true; }), ConfigError);
  EXPECT_THROW(generate(*model, {50}, {}, [](int64_t) { return true; }), ConfigError);
}

// Two rows with documents of these lengths, each as if it were alone: losses and gradients.
TEST(LanguageModel, PackedRowsHaveTheLossOfTheirDocuments) {
  const std::vector<int64_t> lengths{5, 10, 1, 16};
  for (ModelSpec spec : every()) {
    spec.dropout = 0;
    for (const Recompute recompute : {Recompute::none, Recompute::selective, Recompute::full}) {
      LanguageModel model(spec, {.recompute = recompute});
      initialize(*model, 3);
      const at::Tensor tokens = some_tokens(2), flat = tokens.view({-1});
      std::vector<at::Tensor> positions, alone;
      const auto loss_of = [](const at::Tensor& logits, const at::Tensor& targets) {
        return nn::cross_entropy(logits.flatten(0, 1), targets);
      };
      int64_t begin = 0;
      for (const int64_t length : lengths) {
        const at::Tensor document = flat.narrow(0, begin, length);
        positions.push_back(at::arange(length, at::kLong));
        alone.push_back(loss_of(model->forward(document.unsqueeze(0)), document));
        begin += length;
      }
      const at::Tensor sum = at::stack(alone).sum();
      sum.backward();
      std::vector<at::Tensor> expected;
      for (const at::Tensor& parameter : model->parameters())
        expected.push_back(parameter.grad().clone());
      model->zero_grad();
      const at::Tensor packed =
          loss_of(model->forward(tokens, at::cat(positions).view({2, 16})), flat);
      packed.backward();
      EXPECT_NEAR(packed.item<double>(), sum.item<double>(), 1e-5 * sum.item<double>());
      for (size_t i = 0; i < expected.size(); ++i)
        EXPECT_TRUE(at::allclose(model->parameters()[i].grad(), expected[i], 1e-4, 1e-5)) << i;
    }
    // A tensor that is filled again has other documents.
    const at::NoGradGuard no_grad;
    LanguageModel model(spec, {});
    initialize(*model, 3);
    const at::Tensor tokens = some_tokens(1), whole = at::arange(16, at::kLong).unsqueeze(0);
    const at::Tensor positions = at::cat({at::arange(10), at::arange(6)}).unsqueeze(0);
    const at::Tensor two = model->forward(tokens, positions);
    positions.copy_(whole);
    EXPECT_TRUE(at::equal(model->forward(tokens, positions), model->forward(tokens, whole)));
    EXPECT_FALSE(at::allclose(two, model->forward(tokens, whole)));
  }
}

}  // namespace
}  // namespace lockstep::model
