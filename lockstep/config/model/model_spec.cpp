// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/model/model_spec.h"

#include <cmath>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/require.h"

namespace lockstep::config {
namespace {

constexpr double kStd = 0.02;
// Far above any model there is; they keep the number of parameters inside int64_t.
constexpr int64_t kMostLayers = 1 << 16, kMostHidden = 1 << 20, kMostFfn = 1 << 22;
constexpr int64_t kMostIds = int64_t{1} << 31;

constexpr Requirement require_spec("model");

void require_size(const char* what, int64_t value, int64_t least, int64_t most) {
  require_spec(value >= least && value <= most, what, value,
               format("at least {} and at most {}", least, most));
}

void require_positive(const char* what, double value) {
  require_spec(value > 0 && std::isfinite(value), what, value, "above 0");
}

// Collects the tensors; knows how each kind of parameter begins.
class Inventory {
 public:
  explicit Inventory(const ModelSpec& spec)
      : biased_(spec.kind == ModelKind::gpt),
        residual_std_(kStd / std::sqrt(2.0 * static_cast<double>(spec.layers))) {}

  void matrix(std::string name, int64_t rows, int64_t columns, double std = kStd) {
    tensors_.push_back({std::move(name), {rows, columns}, InitKind::normal, std});
  }
  void linear(const std::string& name, int64_t rows, int64_t columns, double std = kStd) {
    matrix(name + ".weight", rows, columns, std);
    if (biased_) bias(name, rows);
  }
  // Its output is added to the residual stream: narrower, so that the stream does not grow with the
  // number of layers.
  void residual_linear(const std::string& name, int64_t rows, int64_t columns) {
    linear(name, rows, columns, residual_std_);
  }
  void norm(const std::string& name, int64_t size) {
    tensors_.push_back({name + ".weight", {size}, InitKind::ones, 0});
    if (biased_) bias(name, size);
  }
  void bias(const std::string& name, int64_t size) {
    tensors_.push_back({name + ".bias", {size}, InitKind::zeros, 0});
  }

  std::vector<TensorSpec> tensors_;

 private:
  bool biased_;  // all linear maps and norms are
  double residual_std_;
};

}  // namespace

std::string_view name_of(ModelKind kind) { return kind == ModelKind::gpt ? "gpt" : "llama"; }

int64_t ModelSpec::ffn_size() const {
  if (ffn > 0) return ffn;
  if (kind == ModelKind::gpt) return 4 * hidden;
  const int64_t exact = (8 * hidden + 2) / 3;  // rounded up
  return (exact + 63) / 64 * 64;
}

void ModelSpec::validate() const {
  require_size("layers", layers, 1, kMostLayers);
  require_size("hidden", hidden, 1, kMostHidden);
  require_size("heads", heads, 1, hidden);
  require_size("kv_heads", kv_heads, 0, heads);
  require_size("head_dim", head_dim, 0, kMostHidden);
  require_size("ffn", ffn, 0, kMostFfn);
  require_size("vocab", vocab, 0, kMostIds);
  require_size("positions", positions, 0, kMostIds);
  require_spec(head_dim > 0 || hidden % heads == 0, "hidden", hidden,
               format("divisible by {} heads", heads));
  require_size("heads x head_dim", heads * head_size(), 1, kMostFfn);
  require_size("window", window, 0, kMostIds);
  require_spec(heads % num_kv_heads() == 0, "heads", heads,
               format("divisible by {} kv_heads", num_kv_heads()));
  require_spec(dropout >= 0 && dropout < 1, "dropout", dropout, "at least 0 and below 1");
  require_positive("norm_epsilon", norm_epsilon);
  require_positive("rope_theta", rope_theta);
  if (kind == ModelKind::gpt) {
    require_spec(num_kv_heads() == heads, "kv_heads", kv_heads,
                 format("{}, the number of heads: gpt has as many of both", heads));
    if (rope_scaling)
      throw ConfigError("[model] rope_scaling is set, but gpt has no rotary positions");
    require_spec(heads * head_size() == hidden, "head_dim", head_dim,
                 format("hidden / heads for gpt (hidden {}, {} heads)", hidden, heads));
    require_spec(!qkv_bias, "qkv_bias", qkv_bias, "false for gpt, which has all biases");
    require_spec(!qk_norm, "qk_norm", qk_norm, "false for gpt");
    require_spec(window == 0, "window", window, "0 for gpt, which attends to all before it");
    return;
  }
  require_spec(head_size() % 2 == 0, head_dim > 0 ? "head_dim" : "hidden / heads", head_size(),
               format("even for rotary positions (hidden {}, {} heads)", hidden, heads));
  require_spec(!qkv_bias || !qk_norm, "qkv_bias", qkv_bias,
               "false with qk_norm: Qwen2 has the one, Qwen3 the other, and no family has both");
  if (!rope_scaling) return;
  require_positive("rope_scaling factor", rope_scaling->factor);
  require_positive("rope_scaling low_freq_factor", rope_scaling->low_freq_factor);
  require_spec(rope_scaling->high_freq_factor > rope_scaling->low_freq_factor &&
                   std::isfinite(rope_scaling->high_freq_factor),
               "rope_scaling high_freq_factor", rope_scaling->high_freq_factor,
               format("above low_freq_factor {}", rope_scaling->low_freq_factor));
  require_size("rope_scaling original_positions", rope_scaling->original_positions, 1, kMostIds);
}

ModelSpec ModelSpec::resolved(int64_t seq_len, int64_t tokenizer_vocab) const {
  validate();
  ModelSpec spec = *this;
  spec.kv_heads = num_kv_heads();
  if (head_dim * heads == hidden) spec.head_dim = 0;
  spec.ffn = ffn_size();
  spec.tied = is_tied();
  if (vocab == 0) spec.vocab = tokenizer_vocab;
  if (positions == 0) spec.positions = seq_len;
  spec.validate();
  return spec;
}

std::vector<TensorSpec> ModelSpec::tensors() const {
  validate();
  require_size("vocab", vocab, 1, kMostIds);
  const bool gpt = kind == ModelKind::gpt;
  const int64_t ffn_rows = ffn_size();
  Inventory all(*this);
  all.matrix("embed.weight", vocab, hidden);
  if (gpt) {
    require_size("positions", positions, 1, kMostIds);
    all.matrix("positions.weight", positions, hidden);
  }
  for (int64_t i = 0; i < layers; ++i) {
    const std::string block = format("blocks.{}.", i);
    all.norm(block + "norm1", hidden);
    all.linear(block + "attention.qkv", qkv_rows(), hidden);
    if (qkv_bias) all.bias(block + "attention.qkv", qkv_rows());
    if (qk_norm) {
      all.norm(block + "attention.q_norm", head_size());
      all.norm(block + "attention.k_norm", head_size());
    }
    all.residual_linear(block + "attention.out", hidden, heads * head_size());
    all.norm(block + "norm2", hidden);
    if (gpt) {
      all.linear(block + "mlp.up", ffn_rows, hidden);
    } else {
      all.linear(block + "mlp.gate_up", 2 * ffn_rows, hidden);
    }
    all.residual_linear(block + "mlp.down", hidden, ffn_rows);
  }
  all.norm("norm", hidden);
  if (!is_tied()) all.matrix("head.weight", vocab, hidden);
  return std::move(all.tensors_);
}

int64_t ModelSpec::parameters() const {
  int64_t count = 0;
  for (const TensorSpec& tensor : tensors()) count += layout::numel_of(tensor.shape);
  return count;
}

std::string ModelSpec::describe() const {
  std::string text =
      format("{}: {} layers, hidden {}, {} heads", name_of(kind), layers, hidden, heads);
  if (num_kv_heads() != heads) text += format(" ({} for keys and values)", num_kv_heads());
  if (heads * head_size() != hidden) text += format(" of {}", head_size());
  if (qkv_bias) text += ", qkv bias";
  if (qk_norm) text += ", qk norm";
  if (window > 0) text += format(", window {}", window);
  text += format(", ffn {}", ffn_size());
  if (vocab > 0) text += format(", vocab {}", vocab);
  if (positions > 0) text += format(", {} positions", positions);
  text += is_tied() ? ", tied" : ", untied";
  if (dropout > 0) text += format(", dropout {}", dropout);
  return text;
}

}  // namespace lockstep::config
