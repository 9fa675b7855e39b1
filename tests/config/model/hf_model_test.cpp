// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/model/hf_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "lockstep/core/error.h"
#include "tests/support/says.h"

namespace lockstep::config {
namespace {

using nlohmann::json;
using test::says;
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

// Mistral-7B-v0.1
json mistral_json() {
  return json::parse(R"({"model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-05, "sliding_window": 4096,
    "tie_word_embeddings": false, "rope_theta": 10000.0})");
}

// Qwen2.5-0.5B
json qwen2_json() {
  return json::parse(R"({"model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896,
    "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
    "hidden_act": "silu", "max_position_embeddings": 32768, "max_window_layers": 24, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": 32768, "use_mrope": false, "use_sliding_window": false,
    "tie_word_embeddings": true})");
}

// Qwen3-0.6B
json qwen3_json() {
  return json::parse(R"({"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
    "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 40960, "max_window_layers": 28,
    "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null,
    "use_sliding_window": false, "attention_bias": false, "tie_word_embeddings": true})");
}

ModelSpec read(const json& config) { return model_spec_from_hf(config.dump(), "config.json"); }

void expect_refused(json config, const char* key, const json& value, const std::string& message) {
  config[key] = value;
  EXPECT_THAT([&] { read(config); },
              ThrowsMessage<ConfigError>(says("config.json: ... " + message)));
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
  expect_refused(gpt2(), "model_type", "bert",
                 "model_type is \"bert\", must be gpt2, llama, mistral, qwen2 or qwen3");
  expect_refused(gpt2(), "n_layer", "12", "n_layer is \"12\" ... whole number");
  expect_refused(gpt2(), "n_layer", uint64_t{1} << 63,
                 "n_layer is 9223372036854775808 ... whole number");
  expect_refused(gpt2(), "n_layer", nullptr, "n_layer is missing");
  expect_refused(gpt2(), "n_head", 5, "[model] ... hidden is 768 ... divisible by 5 heads");
  expect_refused(llama_json(), "hidden_act", "gelu", "hidden_act is \"gelu\", must be silu");
  expect_refused(llama_json(), "attention_bias", true,
                 "attention_bias is true ... false ... llama");
  expect_refused(llama_json(), "mlp_bias", true, "mlp_bias is true ... false ... llama");
  expect_refused(qwen3_json(), "attention_bias", true,
                 "attention_bias is true, must be false: our qwen3 has no biases");
  expect_refused(qwen3_json(), "head_dim", 63,
                 "[model] ... head_dim is 63 ... even ... hidden 1024, 16 heads");
  expect_refused(mistral_json(), "sliding_window", 0, "sliding_window is 0 ... above 0 ... null");
  expect_refused(llama_json(), "rope_scaling", {{"type", "linear"}, {"factor", 2.0}},
                 "rope_scaling: type is \"linear\", must be default or llama3");
  expect_refused(llama_json(), "rope_scaling", {{"rope_type", "llama3"}, {"factor", 2.0}},
                 "rope_scaling: low_freq_factor is missing");
  expect_refused(llama_json(), "rope_parameters", {{"rope_type", "yarn"}},
                 "rope_parameters: rope_type is \"yarn\", must be default or llama3");
  expect_refused(llama_json(), "quantization_config", {{"bits", 4}},
                 "quantization_config is {\"bits\":4} ... absent");
  EXPECT_THROW(model_spec_from_hf("{", "config.json"), ConfigError);
  EXPECT_THROW(model_spec_from_hf("[]", "config.json"), ConfigError);
}

TEST(HfModel, ReadsMistral) {
  const ModelSpec expected{.kind = ModelKind::llama,
                           .layers = 32,
                           .hidden = 4096,
                           .heads = 32,
                           .kv_heads = 8,
                           .ffn = 14336,
                           .vocab = 32000,
                           .positions = 32768,
                           .tied = false,
                           .window = 4096};
  EXPECT_EQ(read(mistral_json()), expected);
  EXPECT_EQ(expected.parameters(), 7'241'732'096);
  json config = mistral_json();
  config["sliding_window"] = nullptr;  // as from version 0.2 on
  EXPECT_EQ(read(config).window, 0);
  config.erase("sliding_window");  // transformers takes 4096 for it
  EXPECT_EQ(read(config).window, 4096);
  config["head_dim"] = 160;  // Mistral Nemo has a width of its own
  EXPECT_EQ(read(config).head_size(), 160);
}

TEST(HfModel, ReadsQwen2) {
  const ModelSpec expected{.kind = ModelKind::llama,
                           .layers = 24,
                           .hidden = 896,
                           .heads = 14,
                           .kv_heads = 2,
                           .ffn = 4864,
                           .vocab = 151936,
                           .positions = 32768,
                           .tied = true,
                           .norm_epsilon = 1e-6,
                           .rope_theta = 1e6,
                           .qkv_bias = true};
  EXPECT_EQ(read(qwen2_json()), expected);
  EXPECT_EQ(expected.parameters(), 494'032'768);
}

TEST(HfModel, ReadsQwen3) {
  const ModelSpec expected{.kind = ModelKind::llama,
                           .layers = 28,
                           .hidden = 1024,
                           .heads = 16,
                           .kv_heads = 8,
                           .head_dim = 128,
                           .ffn = 3072,
                           .vocab = 151936,
                           .positions = 40960,
                           .tied = true,
                           .norm_epsilon = 1e-6,
                           .rope_theta = 1e6,
                           .qk_norm = true};
  EXPECT_EQ(read(qwen3_json()), expected);
  EXPECT_EQ(expected.parameters(), 596'049'920);
  json config = qwen3_json();
  config.erase("head_dim");  // 128 whatever the hidden size
  EXPECT_EQ(read(config), expected);
}

TEST(HfModel, WindowsOfQwen) {
  for (json config : {qwen2_json(), qwen3_json()}) {
    const int64_t layers = config["num_hidden_layers"];
    config["use_sliding_window"] = true;
    config["sliding_window"] = 4096;
    EXPECT_EQ(read(config).window, 0);  // max_window_layers is the number of layers
    config["max_window_layers"] = 0;
    EXPECT_EQ(read(config).window, 4096);
    config["max_window_layers"] = 3;
    EXPECT_THAT([&] { read(config); }, ThrowsMessage<ConfigError>(testing::AllOf(
                                           testing::HasSubstr("max_window_layers is 3"),
                                           testing::HasSubstr("sliding_window 4096"),
                                           testing::HasSubstr("and 3 without"))));
    config["layer_types"] = std::vector<std::string>(layers, "sliding_attention");
    EXPECT_EQ(read(config).window, 4096);
    config["layer_types"][0] = "full_attention";
    EXPECT_THROW(read(config), ConfigError);
    config["sliding_window"] = 40960;  // no sequence is longer
    EXPECT_EQ(read(config).window, 0);
    config["layer_types"] = 7;
    EXPECT_THROW(read(config), ConfigError);
  }
  json config = qwen2_json();
  config["use_sliding_window"] = true;
  config["sliding_window"] = 64;
  config["num_hidden_layers"] = 30;
  config.erase("max_window_layers");  // 28 for transformers
  EXPECT_THAT([&] { read(config); },
              ThrowsMessage<ConfigError>(testing::HasSubstr("max_window_layers is missing")));
}

TEST(HfModel, ConfigGoesBothWays) {
  json short_window = qwen3_json(), wide = llama_json();
  short_window["use_sliding_window"] = true;
  short_window["sliding_window"] = 64;
  short_window["max_window_layers"] = 0;
  wide["head_dim"] = 128;
  for (const json& config :
       {gpt2(), llama_json(), wide, mistral_json(), qwen2_json(), qwen3_json(), short_window}) {
    const ModelSpec spec = read(config);
    EXPECT_EQ(model_spec_from_hf(hf_config_json(spec), "x"), spec);
    EXPECT_EQ(json::parse(hf_config_json(spec))["model_type"], config["model_type"]);
  }
  json plain = mistral_json();
  plain["sliding_window"] = nullptr;
  EXPECT_EQ(json::parse(hf_config_json(read(plain)))["model_type"], "llama");  // the same model
  const json qwen3 = json::parse(hf_config_json(read(short_window)));
  EXPECT_EQ(qwen3["architectures"], json::array({"Qwen3ForCausalLM"}));
  EXPECT_EQ(qwen3["layer_types"], std::vector<std::string>(28, "sliding_attention"));
  EXPECT_EQ(qwen3["head_dim"], 128);
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
  expect_tiles(read(qwen2_json()));
  expect_tiles(read(qwen3_json()));
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
