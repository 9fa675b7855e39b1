// SPDX-License-Identifier: Apache-2.0
// What a model consists of: its sizes, and from them every tensor's name, shape and initial values.
// The models, the planner, checkpoints and imports all read this, so shapes are written once.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/layout/box.h"

namespace lockstep::config {

// gpt:   learned positions, layer norms, biases, GELU (tanh form).
// llama: rotary positions (rotate-half), RMS norms, no biases, SwiGLU. With options of ModelSpec it
//        is also Mistral (window), Qwen2 (qkv_bias) and Qwen3 (qk_norm, head_dim).
enum class ModelKind { gpt, llama };

std::string_view name_of(ModelKind kind);

// Rotary frequencies stretched as Llama 3.1 does ("llama3" in Hugging Face's files).
struct RopeScaling {
  double factor = 8, low_freq_factor = 1, high_freq_factor = 4;
  int64_t original_positions = 8192;

  bool operator==(const RopeScaling&) const = default;
};

enum class InitKind { normal, ones, zeros };

struct TensorSpec {
  std::string name;
  layout::Shape shape;
  InitKind init = InitKind::normal;
  double std = 0;  // of a normal one; else 0

  bool operator==(const TensorSpec&) const = default;
};

// A value. Zeros that resolved() fills are allowed until tensors are asked for.
struct ModelSpec {
  ModelKind kind = ModelKind::gpt;
  int64_t layers = 4, hidden = 128, heads = 4;
  int64_t kv_heads = 0;   // 0: as many as heads; only llama may have fewer
  int64_t head_dim = 0;   // width of a head; 0: hidden / heads; only llama may have another
  int64_t ffn = 0;        // 0: 4 x hidden (gpt); 8/3 x hidden, up to a multiple of 64 (llama)
  int64_t vocab = 0;      // 0: the tokenizer's
  int64_t positions = 0;  // longest sequence; 0: the one trained with
  double dropout = 0;
  std::optional<bool> tied = std::nullopt;  // head.weight is embed.weight; not set: only for gpt
  double norm_epsilon = 1e-5;
  double rope_theta = 10000;                               // llama only
  std::optional<RopeScaling> rope_scaling = std::nullopt;  // llama only
  bool qkv_bias = false;  // llama only: the projection to queries, keys and values has a bias
  bool qk_norm = false;   // llama only: RMS norms of each query and key head, before the rotation
  // llama only: a position attends to this many, itself and those before it; 0: to all before it.
  int64_t window = 0;

  int64_t head_size() const { return head_dim > 0 ? head_dim : hidden / heads; }
  int64_t num_kv_heads() const { return kv_heads > 0 ? kv_heads : heads; }
  int64_t ffn_size() const;
  bool is_tied() const { return tied.value_or(kind == ModelKind::gpt); }
  // Rows of attention.qkv: the query heads', then the key heads', then the value heads'.
  int64_t qkv_rows() const { return (heads + 2 * num_kv_heads()) * head_size(); }

  // Throws ConfigError, with the numbers, for the first rule that is broken.
  void validate() const;
  // Without unset values, and with zeros only where they have a meaning of their own (head_dim,
  // window). Throws as validate() does.
  ModelSpec resolved(int64_t seq_len, int64_t tokenizer_vocab) const;

  // Every parameter once, in the order of the model. The vocabulary and, for gpt, the positions
  // must be known.
  std::vector<TensorSpec> tensors() const;
  int64_t parameters() const;
  // "gpt: 4 layers, hidden 128, 4 heads, ffn 512, vocab 256, 64 positions, tied"
  std::string describe() const;

  bool operator==(const ModelSpec&) const = default;
};

// Reads a config.json of model_type gpt2, llama, mistral, qwen2 or qwen3, as transformers 4 and 5
// write them. What our models do not have is a ConfigError with key and value; `path` names the
// file in messages.
// Dropout stays 0: it belongs to a training, not to the weights.
ModelSpec model_spec_from_hf(const std::string& config_json, const std::string& path);

}  // namespace lockstep::config
