// SPDX-License-Identifier: Apache-2.0
// Hugging Face folders in memory and on disk, for tests of what goes there and back.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "lockstep/config/model/hf_model.h"
#include "lockstep/formats/checkpoint_reader.h"
#include "lockstep/formats/hf_directory.h"
#include "lockstep/formats/safetensors_writer.h"
#include "tests/cli/checkpoint/models.h"
#include "tests/support/subprocess.h"

namespace lockstep::test {

using config::ModelKind;
using Words = std::vector<std::string>;
namespace fs = std::filesystem;

struct Array {
  layout::Shape shape;
  std::vector<float> values;

  bool operator==(const Array&) const = default;
};
using Arrays = std::map<std::string, Array>;

// ---- the mapping, stated once more ----

// Rows of a matrix (or elements of a vector) of `width` columns.
inline std::vector<float> rows_of(const std::vector<float>& values, int64_t width, int64_t begin,
                                  int64_t end) {
  return {values.begin() + begin * width, values.begin() + end * width};
}

inline Array transposed(const std::vector<float>& values, int64_t rows, int64_t columns) {
  Array out{{columns, rows}, {}};
  for (int64_t c = 0; c < columns; ++c) {
    for (int64_t r = 0; r < rows; ++r) {
      out.values.push_back(values[static_cast<size_t>(r * columns + c)]);
    }
  }
  return out;
}

// Sizes are those of small_config.
inline Arrays gpt2_arrays(const Values& ours, bool tied, const std::string& prefix) {
  Arrays theirs;
  const auto vector = [&](const std::string& name, const std::string& from) {
    theirs[prefix + name] = {{static_cast<int64_t>(ours.at(from).size())}, ours.at(from)};
  };
  const auto conv1d = [&](const std::string& name, const std::string& from, int64_t rows,
                          int64_t columns) {
    theirs[prefix + name + ".weight"] = transposed(ours.at(from + ".weight"), rows, columns);
    vector(name + ".bias", from + ".bias");
  };
  theirs[prefix + "wte.weight"] = {{20, 8}, ours.at("embed.weight")};
  theirs[prefix + "wpe.weight"] = {{16, 8}, ours.at("positions.weight")};
  for (const char* i : {"0", "1"}) {
    const std::string a = std::string("blocks.") + i + ".", b = std::string("h.") + i + ".";
    for (const char* end : {".weight", ".bias"}) {
      vector(b + "ln_1" + end, a + "norm1" + end);
      vector(b + "ln_2" + end, a + "norm2" + end);
    }
    conv1d(b + "attn.c_attn", a + "attention.qkv", 24, 8);
    conv1d(b + "attn.c_proj", a + "attention.out", 8, 8);
    conv1d(b + "mlp.c_fc", a + "mlp.up", 12, 8);
    conv1d(b + "mlp.c_proj", a + "mlp.down", 8, 12);
  }
  vector("ln_f.weight", "norm.weight");
  vector("ln_f.bias", "norm.bias");
  if (!tied) theirs["lm_head.weight"] = {{20, 8}, ours.at("head.weight")};
  return theirs;
}

// Of small_config, or with a window, with biases (Qwen2), or with norms and heads of 6 (Qwen3).
inline Arrays llama_arrays(const config::ModelSpec& model, const Values& ours) {
  const bool tied = model.is_tied();
  const int64_t width = model.qk_norm ? 6 : 2, q = 4 * width, k = q + 2 * width, v = k + 2 * width;
  Arrays theirs;
  theirs["model.embed_tokens.weight"] = {{20, 8}, ours.at("embed.weight")};
  theirs["model.norm.weight"] = {{8}, ours.at("norm.weight")};
  for (const char* i : {"0", "1"}) {
    const std::string a = std::string("blocks.") + i + ".";
    const std::string b = std::string("model.layers.") + i + ".";
    theirs[b + "input_layernorm.weight"] = {{8}, ours.at(a + "norm1.weight")};
    theirs[b + "post_attention_layernorm.weight"] = {{8}, ours.at(a + "norm2.weight")};
    const auto& qkv = ours.at(a + "attention.qkv.weight");
    theirs[b + "self_attn.q_proj.weight"] = {{q, 8}, rows_of(qkv, 8, 0, q)};
    theirs[b + "self_attn.k_proj.weight"] = {{k - q, 8}, rows_of(qkv, 8, q, k)};
    theirs[b + "self_attn.v_proj.weight"] = {{v - k, 8}, rows_of(qkv, 8, k, v)};
    if (model.qkv_bias) {
      const auto& bias = ours.at(a + "attention.qkv.bias");
      theirs[b + "self_attn.q_proj.bias"] = {{q}, rows_of(bias, 1, 0, q)};
      theirs[b + "self_attn.k_proj.bias"] = {{k - q}, rows_of(bias, 1, q, k)};
      theirs[b + "self_attn.v_proj.bias"] = {{v - k}, rows_of(bias, 1, k, v)};
    }
    if (model.qk_norm) {
      theirs[b + "self_attn.q_norm.weight"] = {{6}, ours.at(a + "attention.q_norm.weight")};
      theirs[b + "self_attn.k_norm.weight"] = {{6}, ours.at(a + "attention.k_norm.weight")};
    }
    theirs[b + "self_attn.o_proj.weight"] = {{8, q}, ours.at(a + "attention.out.weight")};
    const auto& gate_up = ours.at(a + "mlp.gate_up.weight");
    theirs[b + "mlp.gate_proj.weight"] = {{12, 8}, rows_of(gate_up, 8, 0, 12)};
    theirs[b + "mlp.up_proj.weight"] = {{12, 8}, rows_of(gate_up, 8, 12, 24)};
    theirs[b + "mlp.down_proj.weight"] = {{8, 12}, ours.at(a + "mlp.down.weight")};
  }
  if (!tied) theirs["lm_head.weight"] = {{20, 8}, ours.at("head.weight")};
  return theirs;
}

inline Arrays arrays_of(const config::TrainConfig& config, const Values& values) {
  return config.model.kind == ModelKind::gpt
             ? gpt2_arrays(values, config.model.is_tied(), "transformer.")
             : llama_arrays(config.model, values);
}

// ---- folders ----

inline Arrays read_hf(const std::string& folder) {
  formats::HfDirectory directory(folder);
  Arrays arrays;
  for (const std::string& name : directory.names()) {
    const auto tensor = directory.find(name);
    EXPECT_EQ(tensor.dtype, "F32");
    auto& [shape, values] = arrays[name];
    shape = tensor.shape;
    values.resize(tensor.bytes.size() / 4);
    std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
  }
  return arrays;
}

inline void write_hf(const std::string& folder, const config::ModelSpec& model,
                     const Arrays& arrays) {
  fs::create_directories(folder);
  write_file(folder + "/config.json", config::hf_config_json(model));
  std::vector<formats::SafetensorsTensor> tensors;
  for (const auto& [name, array] : arrays) tensors.push_back({name, "F32", array.shape});
  formats::SafetensorsWriter writer(folder + "/model.safetensors", tensors);
  const auto entries = writer.entries();
  for (const auto& entry : entries) {
    writer.write(entry.name, std::as_bytes(std::span(arrays.at(entry.name).values)));
  }
  writer.finish();
}

inline Values read_checkpoint(const std::string& path) {
  formats::CheckpointReader reader(path);
  Values values;
  for (const auto& [name, record] : reader.manifest().tensors) {
    values[name].resize(static_cast<size_t>(layout::numel_of(record.shape)));
    reader.read(name, layout::Box::whole(record.shape),
                std::as_writable_bytes(std::span(values[name])));
  }
  return values;
}

class CheckpointConvert : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return dir_.path() + "/" + name; }

  static Result run(Words words) {
    words.insert(words.begin(), "checkpoint");
    return lockstep_command(words);
  }

  // What a failure left in the folder of the test.
  Words entries() const {
    Words names;
    for (const auto& entry : fs::directory_iterator(dir_.path())) {
      names.push_back(entry.path().filename().string());
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  TempDir dir_;
  const config::TrainConfig gpt_ = small_config(ModelKind::gpt);
  const config::TrainConfig llama_ = small_config(ModelKind::llama);
};

}  // namespace lockstep::test
