// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/model/hf_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "lockstep/core/error.h"

namespace lockstep::config {
namespace {

using nlohmann::json;
using testing::StrEq;
using testing::ThrowsMessage;

json gpt2() {
  return json::parse(
      R"({"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": 768,
    "n_layer": 12, "n_head": 12, "n_inner": null, "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-05, "resid_pdrop": 0.1, "attn_pdrop": 0.1})");
}

json llama_json() {
  return json::parse(R"({"model_type": "llama", "vocab_size": 128256, "hidden_size": 2048,
    "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 64, "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-05,
    "tie_word_embeddings": true, "attention_bias": false, "rope_theta": 500000.0,
    "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"}})");
}

ModelSpec read(const json& config) { return model_spec_from_hf(config.dump(), "config.json"); }

void expect_refused(json config, const char* key, const json& value, const std::string& message) {
  config[key] = value;
  EXPECT_THAT([&] { read(config); }, ThrowsMessage<ConfigError>(StrEq("config.json: " + message)));
}

TEST(HfModel, ReadsGpt2) {
  const ModelSpec expected{.kind = ModelKind::gpt,
                           .layers = 12,
                           .hidden = 768,
                           .heads = 12,
                           .ffn = 3072,
                           .vocab = 50257,
                           .positions = 1024,
                           .tied = true};
  EXPECT_EQ(read(gpt2()), expected);
  EXPECT_EQ(read(gpt2()).parameters(), 124'439'808);
  json config = gpt2();
  config.erase("n_positions");
  config["n_ctx"] = 77;
  config["n_inner"] = 100;
  config["tie_word_embeddings"] = false;
  EXPECT_EQ(read(config).positions, 77);
  EXPECT_EQ(read(config).ffn, 100);
  EXPECT_FALSE(read(config).is_tied());
}

TEST(HfModel, ReadsLlamaOfBothVersions) {
  const ModelSpec expected{.kind = ModelKind::llama,
                           .layers = 16,
                           .hidden = 2048,
                           .heads = 32,
                           .kv_heads = 8,
                           .ffn = 8192,
                           .vocab = 128256,
                           .positions = 131072,
                           .tied = true,
                           .rope_theta = 500000,
                           .rope_scaling = RopeScaling{32, 1, 4, 8192}};
  EXPECT_EQ(read(llama_json()), expected);
  json newer = llama_json();
  newer["rope_parameters"] = newer["rope_scaling"];
  newer["rope_parameters"]["rope_theta"] = 500000.0;
  newer.erase("rope_scaling");
  newer.erase("rope_theta");
  EXPECT_EQ(read(newer), expected);
  json plain = llama_json();
  plain["rope_scaling"] = nullptr;
  plain.erase("tie_word_embeddings");
  plain.erase("num_key_value_heads");
  plain.erase("rms_norm_eps");
  EXPECT_FALSE(read(plain).rope_scaling.has_value());
  EXPECT_FALSE(read(plain).is_tied());
  EXPECT_EQ(read(plain).kv_heads, 32);
  EXPECT_EQ(read(plain).norm_epsilon, 1e-6);
}

TEST(HfModel, RefusesWhatIsNotThere) {
  expect_refused(gpt2(), "activation_function", "relu",
                 "activation_function is \"relu\", must be gelu_new");
  expect_refused(gpt2(), "scale_attn_weights", false, "scale_attn_weights is false, must be true");
  expect_refused(gpt2(), "scale_attn_by_inverse_layer_idx", true,
                 "scale_attn_by_inverse_layer_idx is true, must be false");
  expect_refused(gpt2(), "model_type", "bert", "model_type is \"bert\", must be gpt2 or llama");
  expect_refused(gpt2(), "n_layer", "12", "n_layer is \"12\", must be a whole number");
  expect_refused(gpt2(), "n_layer", uint64_t{1} << 63,
                 "n_layer is 9223372036854775808, must be a whole number");
  expect_refused(gpt2(), "n_layer", nullptr, "n_layer is missing");
  expect_refused(gpt2(), "n_head", 5, "[model] hidden is 768, must be divisible by 5 heads");
  expect_refused(llama_json(), "hidden_act", "gelu", "hidden_act is \"gelu\", must be silu");
  expect_refused(llama_json(), "attention_bias", true,
                 "attention_bias is true, must be false: our llama has no biases");
  expect_refused(llama_json(), "mlp_bias", true,
                 "mlp_bias is true, must be false: our llama has no biases");
  expect_refused(llama_json(), "head_dim", 128,
                 "head_dim is 128, must be hidden_size 2048 / num_attention_heads 32");
  expect_refused(llama_json(), "rope_scaling", {{"type", "linear"}, {"factor", 2.0}},
                 "rope_scaling: type is \"linear\", must be default or llama3");
  expect_refused(llama_json(), "rope_scaling", {{"rope_type", "llama3"}, {"factor", 2.0}},
                 "rope_scaling: low_freq_factor is missing");
  expect_refused(llama_json(), "rope_parameters", {{"rope_type", "yarn"}},
                 "rope_parameters: rope_type is \"yarn\", must be default or llama3");
  expect_refused(llama_json(), "quantization_config", {{"bits", 4}},
                 "quantization_config is {\"bits\":4}, must be absent: quantized weights cannot be "
                 "read");
  EXPECT_THROW(model_spec_from_hf("{", "config.json"), ConfigError);
  EXPECT_THROW(model_spec_from_hf("[]", "config.json"), ConfigError);
}

TEST(HfModel, ConfigGoesBothWays) {
  for (const json& config : {gpt2(), llama_json()}) {
    const ModelSpec spec = read(config);
    EXPECT_EQ(model_spec_from_hf(hf_config_json(spec), "x"), spec);
  }
  const json written = json::parse(hf_config_json(read(llama_json())));
  EXPECT_EQ(written["rope_scaling"], llama_json()["rope_scaling"]);
  EXPECT_EQ(written["rope_parameters"]["rope_theta"], 500000.0);
  EXPECT_EQ(written["architectures"], json::array({"LlamaForCausalLM"}));
}

// The parts of each tensor tile its rows, and every tensor has parts.
void expect_tiles(const ModelSpec& spec) {
  std::map<std::string, int64_t> covered;
  std::vector<std::string> order;
  for (const HfPart& part : hf_parts(spec)) {
    if (order.empty() || order.back() != part.ours) order.push_back(part.ours);
    EXPECT_EQ(part.rows.begin, covered[part.ours]) << part.ours;
    covered[part.ours] = part.rows.end;
  }
  const auto tensors = spec.tensors();
  ASSERT_EQ(order.size(), tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_EQ(order[i], tensors[i].name);
    EXPECT_EQ(covered[tensors[i].name], tensors[i].shape[0]) << tensors[i].name;
  }
}

TEST(HfModel, PartsTileTheModel) {
  expect_tiles(read(gpt2()));
  expect_tiles(read(llama_json()));
  expect_tiles(ModelSpec{.tied = false}.resolved(16, 32));
}

TEST(HfModel, PartsOfGpt2) {
  const auto parts =
      hf_parts({.layers = 1, .hidden = 8, .heads = 2, .vocab = 11, .positions = 5, .tied = false});
  const std::vector<HfPart> expected = {
      {"embed.weight", {0, 11}, "wte.weight", false},
      {"positions.weight", {0, 5}, "wpe.weight", false},
      {"blocks.0.norm1.weight", {0, 8}, "h.0.ln_1.weight", false},
      {"blocks.0.norm1.bias", {0, 8}, "h.0.ln_1.bias", false},
      {"blocks.0.attention.qkv.weight", {0, 24}, "h.0.attn.c_attn.weight", true},
      {"blocks.0.attention.qkv.bias", {0, 24}, "h.0.attn.c_attn.bias", false},
      {"blocks.0.attention.out.weight", {0, 8}, "h.0.attn.c_proj.weight", true},
      {"blocks.0.attention.out.bias", {0, 8}, "h.0.attn.c_proj.bias", false},
      {"blocks.0.norm2.weight", {0, 8}, "h.0.ln_2.weight", false},
      {"blocks.0.norm2.bias", {0, 8}, "h.0.ln_2.bias", false},
      {"blocks.0.mlp.up.weight", {0, 32}, "h.0.mlp.c_fc.weight", true},
      {"blocks.0.mlp.up.bias", {0, 32}, "h.0.mlp.c_fc.bias", false},
      {"blocks.0.mlp.down.weight", {0, 8}, "h.0.mlp.c_proj.weight", true},
      {"blocks.0.mlp.down.bias", {0, 8}, "h.0.mlp.c_proj.bias", false},
      {"norm.weight", {0, 8}, "ln_f.weight", false},
      {"norm.bias", {0, 8}, "ln_f.bias", false},
      {"head.weight", {0, 11}, "lm_head.weight", false},
  };
  EXPECT_EQ(parts, expected);
}

TEST(HfModel, PartsOfLlama) {
  const auto parts = hf_parts({.kind = ModelKind::llama,
                               .layers = 1,
                               .hidden = 64,
                               .heads = 4,
                               .kv_heads = 2,
                               .ffn = 96,
                               .vocab = 11});
  const std::vector<HfPart> expected = {
      {"embed.weight", {0, 11}, "model.embed_tokens.weight", false},
      {"blocks.0.norm1.weight", {0, 64}, "model.layers.0.input_layernorm.weight", false},
      {"blocks.0.attention.qkv.weight", {0, 64}, "model.layers.0.self_attn.q_proj.weight", false},
      {"blocks.0.attention.qkv.weight", {64, 96}, "model.layers.0.self_attn.k_proj.weight", false},
      {"blocks.0.attention.qkv.weight", {96, 128}, "model.layers.0.self_attn.v_proj.weight", false},
      {"blocks.0.attention.out.weight", {0, 64}, "model.layers.0.self_attn.o_proj.weight", false},
      {"blocks.0.norm2.weight", {0, 64}, "model.layers.0.post_attention_layernorm.weight", false},
      {"blocks.0.mlp.gate_up.weight", {0, 96}, "model.layers.0.mlp.gate_proj.weight", false},
      {"blocks.0.mlp.gate_up.weight", {96, 192}, "model.layers.0.mlp.up_proj.weight", false},
      {"blocks.0.mlp.down.weight", {0, 64}, "model.layers.0.mlp.down_proj.weight", false},
      {"norm.weight", {0, 64}, "model.norm.weight", false},
      {"head.weight", {0, 11}, "lm_head.weight", false},
  };
  EXPECT_EQ(parts, expected);
}

}  // namespace
}  // namespace lockstep::config
