// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/model/hf_model.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <optional>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/io/json.h"

namespace lockstep::config {
namespace {

using Json = io::OrderedJson;

// One object of a config.json. A key that is null counts as missing.
class Keys {
 public:
  Keys(const Json& object, std::string where) : object_(object), where_(std::move(where)) {}

  bool has(const char* key) const { return object_.contains(key) && !object_[key].is_null(); }
  bool is_null(const char* key) const { return object_.contains(key) && object_[key].is_null(); }

  int64_t integer(const char* key, std::optional<int64_t> fallback = std::nullopt) const {
    return read<int64_t>(key, fallback, "a whole number", [](const Json& value) {
      return value.is_number_integer() &&
             (!value.is_number_unsigned() || value.get<uint64_t>() <= uint64_t{INT64_MAX});
    });
  }
  double number(const char* key, std::optional<double> fallback = std::nullopt) const {
    return read<double>(key, fallback, "a number", [](const Json& v) { return v.is_number(); });
  }
  bool boolean(const char* key, bool fallback) const {
    return read<bool>(key, std::optional(fallback), "true or false",
                      [](const Json& v) { return v.is_boolean(); });
  }
  std::string text(const char* key,
                   const std::optional<std::string>& fallback = std::nullopt) const {
    return read<std::string>(key, fallback, "a string",
                             [](const Json& v) { return v.is_string(); });
  }
  std::vector<std::string> texts(const char* key) const {
    return read<std::vector<std::string>>(
        key, std::nullopt, "a list of strings", [](const Json& v) {
          return v.is_array() &&
                 std::ranges::all_of(v, [](const Json& i) { return i.is_string(); });
        });
  }
  std::optional<Keys> object(const char* key) const {
    if (!has(key)) return std::nullopt;
    if (!object_[key].is_object()) fail(key, "an object");
    return Keys(object_[key], format("{}: {}", where_, key));
  }

  // Throws, with the key's value and what it must be, unless it holds.
  void require(const char* key, bool holds, const std::string& supported) const {
    if (!holds) fail(key, supported);
  }

 private:
  [[noreturn]] void fail(const char* key, const std::string& rule) const {
    const std::string value = object_.contains(key) ? object_[key].dump() : "missing";
    throw ConfigError(format("{}: {} is {}, must be {}", where_, key, value, rule));
  }
  template <class T, class Test>
  T read(const char* key, const std::optional<T>& fallback, const char* rule, Test test) const {
    if (!has(key)) {
      if (fallback) return *fallback;
      throw ConfigError(format("{}: {} is missing", where_, key));
    }
    if (!test(object_[key])) fail(key, rule);
    return object_[key].get<T>();
  }

  const Json& object_;
  std::string where_;
};

ModelSpec from_gpt2(const Keys& keys) {
  const std::string activation = keys.text("activation_function", "gelu_new");
  // Two names of one function.
  keys.require("activation_function", activation == "gelu_new" || activation == "gelu_pytorch_tanh",
               "gelu_new");
  keys.require("scale_attn_weights", keys.boolean("scale_attn_weights", true), "true");
  for (const char* key : {"scale_attn_by_inverse_layer_idx", "add_cross_attention"})
    keys.require(key, !keys.boolean(key, false), "false");
  ModelSpec spec;
  spec.kind = ModelKind::gpt;
  spec.layers = keys.integer("n_layer");
  spec.hidden = keys.integer("n_embd");
  spec.heads = keys.integer("n_head");
  spec.ffn = keys.integer("n_inner", 4 * spec.hidden);
  spec.vocab = keys.integer("vocab_size");
  spec.positions = keys.has("n_positions") ? keys.integer("n_positions") : keys.integer("n_ctx");
  spec.tied = keys.boolean("tie_word_embeddings", true);
  spec.norm_epsilon = keys.number("layer_norm_epsilon", 1e-5);
  return spec;
}

// `keys` is rope_scaling (transformers 4) or rope_parameters (5), which has the theta too.
std::optional<RopeScaling> rope_scaling_of(const Keys& keys) {
  const char* key = keys.has("rope_type") ? "rope_type" : "type";
  const std::string type = keys.text(key, "default");
  keys.require(key, type == "default" || type == "llama3", "default or llama3");
  if (keys.has("partial_rotary_factor"))
    keys.require("partial_rotary_factor", keys.number("partial_rotary_factor") == 1, "1");
  if (type == "default") return std::nullopt;
  return RopeScaling{keys.number("factor"), keys.number("low_freq_factor"),
                     keys.number("high_freq_factor"),
                     keys.integer("original_max_position_embeddings")};
}

// The families that are llama with an option, by their model_type, and what they take for keys that
// a config.json leaves out.
struct Family {
  const char *type, *architecture;
  int64_t kv_heads, head_dim, positions;  // kv_heads 0: all; head_dim 0: hidden / heads
};
constexpr Family kLlama{"llama", "LlamaForCausalLM", 0, 0, 2048};
constexpr Family kMistral{"mistral", "MistralForCausalLM", 8, 0, 131072};
constexpr Family kQwen2{"qwen2", "Qwen2ForCausalLM", 32, 0, 32768};
constexpr Family kQwen3{"qwen3", "Qwen3ForCausalLM", 32, 128, 32768};
constexpr const Family* kFamilies[] = {&kLlama, &kMistral, &kQwen2, &kQwen3};
constexpr int64_t kDefaultWindow = 4096, kDefaultFullLayers = 28;

// The family that has just these options. A Mistral without a window is a Llama.
const Family& family_of(const ModelSpec& spec) {
  if (spec.qk_norm) return kQwen3;
  if (spec.qkv_bias) return kQwen2;
  return spec.window > 0 ? kMistral : kLlama;
}

bool is_qwen(const Family& family) { return &family == &kQwen2 || &family == &kQwen3; }

// Layers of one model may differ in Qwen's files; ours may not, unless no sequence is long enough
// to show it.
int64_t window_of_qwen(const Keys& keys, const ModelSpec& spec) {
  if (!keys.boolean("use_sliding_window", false) || keys.is_null("sliding_window")) return 0;
  const int64_t window = keys.integer("sliding_window", kDefaultWindow);
  int64_t sliding = 0, layers = spec.layers;
  const char* key = "layer_types";
  if (keys.has(key)) {
    const std::vector<std::string> types = keys.texts(key);
    layers = static_cast<int64_t>(types.size());
    sliding = std::ranges::count(types, "sliding_attention");
  } else {
    key = "max_window_layers";
    sliding = std::max<int64_t>(spec.layers - keys.integer(key, kDefaultFullLayers), 0);
  }
  if (sliding == 0 || window >= spec.positions) return 0;
  keys.require(key, sliding >= layers,
               format("one kind of attention in all {} layers: with sliding_window {} it has {} "
                      "layers with the window and {} without",
                      layers, window, sliding, layers - sliding));
  return window;
}

int64_t window_of(const Keys& keys, const Family& family, const ModelSpec& spec) {
  if (is_qwen(family)) return window_of_qwen(keys, spec);
  if (&family != &kMistral || keys.is_null("sliding_window")) return 0;
  const int64_t window = keys.integer("sliding_window", kDefaultWindow);
  keys.require("sliding_window", window > 0, "above 0, or null for none");
  return window;
}

ModelSpec from_llama(const Keys& keys, const Family& family) {
  const std::string activation = keys.text("hidden_act", "silu");
  keys.require("hidden_act", activation == "silu" || activation == "swish", "silu");
  for (const char* key : {"attention_bias", "mlp_bias"}) {
    if (&family == &kQwen2) break;  // its biases are not a choice
    keys.require(key, !keys.boolean(key, false),
                 format("false: our {} has no biases", family.type));
  }
  ModelSpec spec;
  spec.kind = ModelKind::llama;
  spec.layers = keys.integer("num_hidden_layers");
  spec.hidden = keys.integer("hidden_size");
  spec.heads = keys.integer("num_attention_heads");
  spec.kv_heads =
      keys.integer("num_key_value_heads", family.kv_heads > 0 ? family.kv_heads : spec.heads);
  spec.head_dim = keys.integer("head_dim", family.head_dim);
  if (spec.head_dim * spec.heads == spec.hidden) spec.head_dim = 0;
  spec.ffn = keys.integer("intermediate_size");
  spec.vocab = keys.integer("vocab_size");
  spec.positions = keys.integer("max_position_embeddings", family.positions);
  spec.tied = keys.boolean("tie_word_embeddings", false);
  spec.norm_epsilon = keys.number("rms_norm_eps", 1e-6);
  spec.rope_theta = keys.number("rope_theta", 10000);
  spec.qkv_bias = &family == &kQwen2;
  spec.qk_norm = &family == &kQwen3;
  spec.window = window_of(keys, family, spec);
  if (const auto parameters = keys.object("rope_parameters")) {
    spec.rope_theta = parameters->number("rope_theta", spec.rope_theta);
    spec.rope_scaling = rope_scaling_of(*parameters);
  } else if (const auto scaling = keys.object("rope_scaling")) {
    spec.rope_scaling = rope_scaling_of(*scaling);
  }
  return spec;
}

// Rows of one tensor cut at the given sizes.
class PartList {
 public:
  struct Slice {
    const char* theirs;
    int64_t rows;
  };

  void add(const std::string& ours, const std::string& prefix, const std::vector<Slice>& slices,
           bool transposed = false) {
    int64_t begin = 0;
    for (const Slice& slice : slices) {
      parts_.push_back({ours, {begin, begin + slice.rows}, prefix + slice.theirs, transposed});
      begin += slice.rows;
    }
  }

  std::vector<HfPart> parts_;
};

void add_gpt2_block(PartList& list, const ModelSpec& spec, int64_t index) {
  const std::string ours = format("blocks.{}.", index), theirs = format("h.{}.", index);
  const struct {
    const char *ours, *theirs;
    int64_t rows;
    bool linear;
  } rows[] = {
      {"norm1", "ln_1", spec.hidden, false},
      {"attention.qkv", "attn.c_attn", spec.qkv_rows(), true},
      {"attention.out", "attn.c_proj", spec.hidden, true},
      {"norm2", "ln_2", spec.hidden, false},
      {"mlp.up", "mlp.c_fc", spec.ffn_size(), true},
      {"mlp.down", "mlp.c_proj", spec.hidden, true},
  };
  for (const auto& row : rows) {
    const std::string name = theirs + row.theirs;
    list.add(format("{}{}.weight", ours, row.ours), name, {{".weight", row.rows}}, row.linear);
    list.add(format("{}{}.bias", ours, row.ours), name, {{".bias", row.rows}});
  }
}

void add_llama_block(PartList& list, const ModelSpec& spec, int64_t index) {
  const std::string ours = format("blocks.{}.", index), theirs = format("model.layers.{}.", index);
  const int64_t hidden = spec.hidden, q = spec.heads * spec.head_size(),
                kv = spec.num_kv_heads() * spec.head_size(), ffn = spec.ffn_size();
  list.add(ours + "norm1.weight", theirs, {{"input_layernorm.weight", hidden}});
  list.add(ours + "attention.qkv.weight", theirs + "self_attn.",
           {{"q_proj.weight", q}, {"k_proj.weight", kv}, {"v_proj.weight", kv}});
  if (spec.qkv_bias) {
    list.add(ours + "attention.qkv.bias", theirs + "self_attn.",
             {{"q_proj.bias", q}, {"k_proj.bias", kv}, {"v_proj.bias", kv}});
  }
  if (spec.qk_norm) {
    for (const char* name : {"q_norm.weight", "k_norm.weight"})
      list.add(ours + "attention." + name, theirs + "self_attn.", {{name, spec.head_size()}});
  }
  list.add(ours + "attention.out.weight", theirs, {{"self_attn.o_proj.weight", hidden}});
  list.add(ours + "norm2.weight", theirs, {{"post_attention_layernorm.weight", hidden}});
  list.add(ours + "mlp.gate_up.weight", theirs + "mlp.",
           {{"gate_proj.weight", ffn}, {"up_proj.weight", ffn}});
  list.add(ours + "mlp.down.weight", theirs, {{"mlp.down_proj.weight", hidden}});
}

Json gpt2_json(const ModelSpec& spec) {
  return {{"model_type", "gpt2"},
          {"architectures", {"GPT2LMHeadModel"}},
          {"vocab_size", spec.vocab},
          {"n_positions", spec.positions},
          {"n_ctx", spec.positions},
          {"n_embd", spec.hidden},
          {"n_layer", spec.layers},
          {"n_head", spec.heads},
          {"n_inner", spec.ffn_size()},
          {"activation_function", "gelu_new"},
          {"layer_norm_epsilon", spec.norm_epsilon},
          {"initializer_range", 0.02},
          {"resid_pdrop", spec.dropout},
          {"embd_pdrop", spec.dropout},
          {"attn_pdrop", 0.0},
          {"scale_attn_weights", true},
          {"tie_word_embeddings", spec.is_tied()}};
}

Json llama_json(const ModelSpec& spec) {
  Json rope = {{"rope_type", spec.rope_scaling ? "llama3" : "default"}};
  if (spec.rope_scaling) {
    rope["factor"] = spec.rope_scaling->factor;
    rope["low_freq_factor"] = spec.rope_scaling->low_freq_factor;
    rope["high_freq_factor"] = spec.rope_scaling->high_freq_factor;
    rope["original_max_position_embeddings"] = spec.rope_scaling->original_positions;
  }
  const Family& family = family_of(spec);
  Json json = {{"model_type", family.type},
               {"architectures", {family.architecture}},
               {"vocab_size", spec.vocab},
               {"hidden_size", spec.hidden},
               {"intermediate_size", spec.ffn_size()},
               {"num_hidden_layers", spec.layers},
               {"num_attention_heads", spec.heads},
               {"num_key_value_heads", spec.num_kv_heads()},
               {"head_dim", spec.head_size()},
               {"hidden_act", "silu"},
               {"max_position_embeddings", spec.positions},
               {"initializer_range", 0.02},
               {"rms_norm_eps", spec.norm_epsilon},
               {"tie_word_embeddings", spec.is_tied()},
               {"rope_theta", spec.rope_theta}};  // here and below: transformers 4 and 5
  if (&family == &kLlama || &family == &kQwen3) json["attention_bias"] = false;
  if (&family == &kLlama) json["mlp_bias"] = false;
  if (&family != &kLlama) {
    json["sliding_window"] = spec.window > 0 ? Json(spec.window) : Json(nullptr);
  }
  if (is_qwen(family)) {
    const bool slides = spec.window > 0;
    json["use_sliding_window"] = slides;
    json["max_window_layers"] = slides ? 0 : spec.layers;
    json["layer_types"] = std::vector<std::string>(static_cast<size_t>(spec.layers),
                                                   slides ? "sliding_attention" : "full_attention");
  }
  json["rope_scaling"] = spec.rope_scaling ? rope : Json(nullptr);
  rope["rope_theta"] = spec.rope_theta;
  json["rope_parameters"] = rope;
  return json;
}

}  // namespace

ModelSpec model_spec_from_hf(const std::string& config_json, const std::string& path) {
  const Json json = io::parse_user_json(config_json, path);
  if (!json.is_object()) throw ConfigError(format("{}: must be a JSON object", path));
  const Keys keys(json, path);
  const std::string type = keys.text("model_type");
  const auto family =
      std::ranges::find_if(kFamilies, [&](const Family* known) { return type == known->type; });
  const bool known = family != std::end(kFamilies);
  keys.require("model_type", type == "gpt2" || known, "gpt2, llama, mistral, qwen2 or qwen3");
  keys.require("quantization_config", !keys.has("quantization_config"),
               "absent: quantized weights cannot be read");
  const ModelSpec spec = known ? from_llama(keys, **family) : from_gpt2(keys);
  try {
    spec.validate();
  } catch (const ConfigError& failure) {
    throw ConfigError(format("{}: {}", path, failure.what()));
  }
  return spec;
}

std::string hf_config_json(const ModelSpec& spec) {
  const Json json = spec.kind == ModelKind::gpt ? gpt2_json(spec) : llama_json(spec);
  return json.dump(2) + "\n";
}

std::vector<HfPart> hf_parts(const ModelSpec& spec) {
  const bool gpt = spec.kind == ModelKind::gpt;
  PartList list;
  list.add("embed.weight", "", {{gpt ? "wte.weight" : "model.embed_tokens.weight", spec.vocab}});
  if (gpt) list.add("positions.weight", "", {{"wpe.weight", spec.positions}});
  for (int64_t i = 0; i < spec.layers; ++i) {
    if (gpt) {
      add_gpt2_block(list, spec, i);
    } else {
      add_llama_block(list, spec, i);
    }
  }
  list.add("norm.weight", "", {{gpt ? "ln_f.weight" : "model.norm.weight", spec.hidden}});
  if (gpt) list.add("norm.bias", "", {{"ln_f.bias", spec.hidden}});
  if (!spec.is_tied()) list.add("head.weight", "", {{"lm_head.weight", spec.vocab}});
  return std::move(list.parts_);
}

}  // namespace lockstep::config
