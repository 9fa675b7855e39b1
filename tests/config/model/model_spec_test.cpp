// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/model/model_spec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <string>

#include "lockstep/core/error.h"
#include "tests/support/says.h"

namespace lockstep::config {
namespace {

using test::says;
using testing::AllOf;
using testing::EndsWith;
using testing::StartsWith;
using testing::ThrowsMessage;

ModelSpec llama() {
  return {.kind = ModelKind::llama, .layers = 2, .hidden = 64, .heads = 4, .kv_heads = 2};
}

void expect_refused(const ModelSpec& spec, const std::string& message) {
  EXPECT_THAT([&] { spec.validate(); }, ThrowsMessage<ConfigError>(says(message)));
}

TEST(ModelSpec, TensorsOfGpt) {
  const ModelSpec spec{.layers = 1, .hidden = 8, .heads = 2, .vocab = 11, .positions = 5};
  const double residual = 0.02 / std::sqrt(2.0);
  const std::vector<TensorSpec> expected = {
      {"embed.weight", {11, 8}, InitKind::normal, 0.02},
      {"positions.weight", {5, 8}, InitKind::normal, 0.02},
      {"blocks.0.norm1.weight", {8}, InitKind::ones, 0},
      {"blocks.0.norm1.bias", {8}, InitKind::zeros, 0},
      {"blocks.0.attention.qkv.weight", {24, 8}, InitKind::normal, 0.02},
      {"blocks.0.attention.qkv.bias", {24}, InitKind::zeros, 0},
      {"blocks.0.attention.out.weight", {8, 8}, InitKind::normal, residual},
      {"blocks.0.attention.out.bias", {8}, InitKind::zeros, 0},
      {"blocks.0.norm2.weight", {8}, InitKind::ones, 0},
      {"blocks.0.norm2.bias", {8}, InitKind::zeros, 0},
      {"blocks.0.mlp.up.weight", {32, 8}, InitKind::normal, 0.02},
      {"blocks.0.mlp.up.bias", {32}, InitKind::zeros, 0},
      {"blocks.0.mlp.down.weight", {8, 32}, InitKind::normal, residual},
      {"blocks.0.mlp.down.bias", {8}, InitKind::zeros, 0},
      {"norm.weight", {8}, InitKind::ones, 0},
      {"norm.bias", {8}, InitKind::zeros, 0},
  };
  EXPECT_EQ(spec.tensors(), expected);
}

TEST(ModelSpec, TensorsOfLlama) {
  ModelSpec spec = llama();
  spec.layers = 1;
  spec.vocab = 11;  // positions are not a tensor: need not be known
  const double residual = 0.02 / std::sqrt(2.0);
  const std::vector<TensorSpec> expected = {
      {"embed.weight", {11, 64}, InitKind::normal, 0.02},
      {"blocks.0.norm1.weight", {64}, InitKind::ones, 0},
      {"blocks.0.attention.qkv.weight", {128, 64}, InitKind::normal, 0.02},  // (4 + 2 x 2) x 16
      {"blocks.0.attention.out.weight", {64, 64}, InitKind::normal, residual},
      {"blocks.0.norm2.weight", {64}, InitKind::ones, 0},
      {"blocks.0.mlp.gate_up.weight", {384, 64}, InitKind::normal, 0.02},
      {"blocks.0.mlp.down.weight", {64, 192}, InitKind::normal, residual},
      {"norm.weight", {64}, InitKind::ones, 0},
      {"head.weight", {11, 64}, InitKind::normal, 0.02},
  };
  EXPECT_EQ(spec.tensors(), expected);
}

// The published models have these many parameters.
TEST(ModelSpec, CountsOfKnownModels) {
  const ModelSpec gpt2{.layers = 12, .hidden = 768, .heads = 12, .vocab = 50257, .positions = 1024};
  EXPECT_EQ(gpt2.parameters(), 124'439'808);
  const ModelSpec llama3{.kind = ModelKind::llama,
                         .layers = 32,
                         .hidden = 4096,
                         .heads = 32,
                         .kv_heads = 8,
                         .ffn = 14336,
                         .vocab = 128256};
  EXPECT_EQ(llama3.parameters(), 8'030'261'248);
}

// Qwen's options, each with its tensors; the width of a head needs not be hidden / heads.
TEST(ModelSpec, OptionsOfLlama) {
  ModelSpec spec{.kind = ModelKind::llama,
                 .layers = 1,
                 .hidden = 50,  // no multiple of the heads
                 .heads = 4,
                 .kv_heads = 2,
                 .head_dim = 24,
                 .ffn = 8,
                 .vocab = 11,
                 .qk_norm = true};
  const double residual = 0.02 / std::sqrt(2.0);
  const std::vector<TensorSpec> all = spec.tensors();
  const std::vector<TensorSpec> expected = {
      {"blocks.0.attention.qkv.weight", {192, 50}, InitKind::normal, 0.02},
      {"blocks.0.attention.q_norm.weight", {24}, InitKind::ones, 0},
      {"blocks.0.attention.k_norm.weight", {24}, InitKind::ones, 0},
      {"blocks.0.attention.out.weight", {50, 96}, InitKind::normal, residual},
  };
  EXPECT_EQ(std::vector(all.begin() + 2, all.begin() + 6), expected);
  EXPECT_THAT(spec.describe(), AllOf(StartsWith("llama: 1 layers, hidden 50, 4 heads (2 "),
                                     EndsWith(") of 24, qk norm, ffn 8, vocab 11, untied")));
  spec.qk_norm = false;
  spec.qkv_bias = true;
  spec.window = 7;
  EXPECT_EQ(spec.tensors()[3], (TensorSpec{"blocks.0.attention.qkv.bias", {192}, InitKind::zeros}));
  EXPECT_THAT(spec.describe(),
              AllOf(StartsWith("llama: 1 layers, hidden 50, 4 heads (2 "),
                    EndsWith(") of 24, qkv bias, window 7, ffn 8, vocab 11, untied")));
  // One model has one spec.
  EXPECT_EQ((ModelSpec{.kind = ModelKind::llama, .hidden = 64, .heads = 4, .head_dim = 16}.resolved(
                8, 8)),
            (ModelSpec{.kind = ModelKind::llama, .hidden = 64, .heads = 4}.resolved(8, 8)));
}

TEST(ModelSpec, ResidualStdFallsWithDepth) {
  ModelSpec spec{.layers = 8, .vocab = 2, .positions = 2};
  for (const TensorSpec& tensor : spec.tensors()) {
    const bool residual = tensor.name.find("attention.out.weight") != std::string::npos ||
                          tensor.name.find("mlp.down.weight") != std::string::npos;
    if (tensor.init == InitKind::normal) {
      EXPECT_DOUBLE_EQ(tensor.std, residual ? 0.02 / 4 : 0.02) << tensor.name;
    }
  }
}

TEST(ModelSpec, EveryNameOnce) {
  ModelSpec spec = llama().resolved(16, 100);
  std::set<std::string> names;
  for (const TensorSpec& tensor : spec.tensors())
    EXPECT_TRUE(names.insert(tensor.name).second) << tensor.name;
  EXPECT_EQ(names.size(), 1u + 2 * 6 + 2);
}

TEST(ModelSpec, ResolvedFillsWhatIsOpen) {
  const ModelSpec gpt = ModelSpec{}.resolved(64, 256);
  EXPECT_EQ(gpt.kv_heads, 4);
  EXPECT_EQ(gpt.ffn, 512);
  EXPECT_EQ(gpt.vocab, 256);
  EXPECT_EQ(gpt.positions, 64);
  EXPECT_EQ(gpt.tied, true);
  const ModelSpec other = llama().resolved(64, 256);
  EXPECT_EQ(other.kv_heads, 2);
  EXPECT_EQ(other.ffn, 192);  // 170.67 up to a multiple of 64
  EXPECT_EQ(other.tied, false);
  const ModelSpec set =
      ModelSpec{.ffn = 7, .vocab = 9, .positions = 11, .tied = false}.resolved(64, 256);
  EXPECT_EQ(set.ffn, 7);
  EXPECT_EQ(set.vocab, 9);
  EXPECT_EQ(set.positions, 11);
  EXPECT_EQ(set.tied, false);
  EXPECT_EQ(set.resolved(1, 1), set);
}

TEST(ModelSpec, FfnOfLlamaIsTwoThirds) {
  // 8/3 x 4096 = 10922.67, which Llama 2 rounds up to 11008 (a multiple of 256); ours of 64.
  EXPECT_EQ((ModelSpec{.kind = ModelKind::llama, .hidden = 4096}.ffn_size()), 10944);
  EXPECT_EQ((ModelSpec{.kind = ModelKind::llama, .hidden = 24}.ffn_size()), 64);
  EXPECT_EQ((ModelSpec{.kind = ModelKind::llama, .hidden = 25}.ffn_size()), 128);  // 66.67
}

TEST(ModelSpec, RejectsBadSizes) {
  expect_refused({.layers = 0}, "[model] ... layers is 0 ... at least 1 ... at most 65536");
  expect_refused({.hidden = -8}, "[model] ... hidden is -8 ... at least 1 ... at most 1048576");
  expect_refused({.heads = 0}, "[model] ... heads is 0 ... at least 1 ... at most 128");
  expect_refused({.heads = 3}, "[model] ... hidden is 128 ... divisible by 3 heads");
  expect_refused({.heads = 4, .kv_heads = 2}, "[model] ... kv_heads is 2 ... 4 ... gpt");
  expect_refused({.dropout = 1}, "[model] ... dropout is 1 ... at least 0 ... below 1");
  expect_refused({.dropout = std::nan("")},
                 "[model] ... dropout is nan ... at least 0 ... below 1");
  expect_refused({.rope_scaling = RopeScaling{}}, "[model] ... rope_scaling is set ... gpt");
  expect_refused({.head_dim = 64},
                 "[model] head_dim is 64, must be hidden / heads for gpt (hidden 128, 4 heads)");
  expect_refused({.qkv_bias = true}, "[model] ... qkv_bias is true ... false for gpt");
  expect_refused({.qk_norm = true}, "[model] ... qk_norm is true ... false for gpt");
  expect_refused({.window = 8}, "[model] ... window is 8 ... 0 for gpt");
  ModelSpec spec = llama();
  spec.kv_heads = 3;
  expect_refused(spec, "[model] ... heads is 4 ... divisible by 3 kv_heads");
  spec = {.kind = ModelKind::llama, .hidden = 20, .heads = 4};
  expect_refused(spec, "[model] ... hidden / heads is 5 ... even ... hidden 20, 4 heads");
  spec = llama();
  spec.qkv_bias = spec.qk_norm = true;
  expect_refused(spec, "[model] ... qkv_bias is true ... false with qk_norm");
  spec = {.kind = ModelKind::llama, .hidden = 1 << 20, .heads = 1 << 20, .head_dim = 1 << 20};
  expect_refused(
      spec, "[model] ... heads x head_dim is 1099511627776 ... at least 1 ... at most 4194304");
  spec = llama();
  spec.rope_scaling = RopeScaling{.low_freq_factor = 4, .high_freq_factor = 4};
  expect_refused(spec,
                 "[model] rope_scaling high_freq_factor is 4, must be above low_freq_factor 4");
  EXPECT_NO_THROW(llama().validate());
}

TEST(ModelSpec, TensorsNeedTheVocabularyAndPositions) {
  EXPECT_THROW(ModelSpec{}.tensors(), ConfigError);
  EXPECT_THROW((ModelSpec{.vocab = 3}.tensors()), ConfigError);
  EXPECT_THROW(ModelSpec{}.resolved(16, 0).tensors(), ConfigError);
}

TEST(ModelSpec, Describe) {
  EXPECT_EQ(ModelSpec{}.resolved(64, 256).describe(),
            "gpt: 4 layers, hidden 128, 4 heads, ffn 512, vocab 256, 64 positions, tied");
  EXPECT_THAT(llama().describe(), AllOf(StartsWith("llama: 2 layers, hidden 64, 4 heads (2 "),
                                        EndsWith("), ffn 192, untied")));
}

}  // namespace
}  // namespace lockstep::config
