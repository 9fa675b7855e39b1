// SPDX-License-Identifier: Apache-2.0
// Small models with known values, saved as checkpoints of several layouts.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/config/train_config.h"
#include "lockstep/formats/checkpoint_folder.h"
#include "lockstep/formats/shard_file.h"
#include "lockstep/layout/shard_math.h"

namespace lockstep::test {

using Values = std::map<std::string, std::vector<float>>;  // whole tensors, row-major

inline config::TrainConfig small_config(config::ModelKind kind, std::optional<bool> tied = {}) {
  config::TrainConfig config;
  config.model.kind = kind;
  config.model.layers = 2;
  config.model.hidden = 8;
  config.model.heads = 4;
  config.model.kv_heads = kind == config::ModelKind::llama ? 2 : 4;
  config.model.ffn = 12;
  config.model.tied = tied;
  config.train.seq_len = 16;
  config.data.tokenizer = "bytes";
  config.model = config.model.resolved(16, 20);
  return config;
}

// One of each family, by the model_type of its config.json.
inline std::map<std::string, config::TrainConfig> families(bool tied) {
  const auto llama = small_config(config::ModelKind::llama, tied);
  std::map<std::string, config::TrainConfig> all{
      {"gpt2", small_config(config::ModelKind::gpt, tied)}, {"llama", llama}};
  all.emplace("mistral", llama).first->second.model.window = 5;
  all.emplace("qwen2", llama).first->second.model.qkv_bias = true;
  auto& qwen3 = all.emplace("qwen3", llama).first->second.model;
  qwen3.qk_norm = true;
  qwen3.head_dim = 6;
  return all;
}

// Exact in float32, and rounded in the shorter types.
inline std::vector<float> known_values(const std::string& name, int64_t count) {
  uint32_t hash = 2166136261;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619;
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t step = (hash % 4001 + static_cast<uint32_t>(i) * 7919) % 4001;
    values.push_back((static_cast<float>(step) - 2000) / 1024);
  }
  return values;
}

inline Values model_values(const config::ModelSpec& model) {
  Values values;
  for (const auto& tensor : model.tensors()) {
    values[tensor.name] = known_values(tensor.name, layout::numel_of(tensor.shape));
  }
  return values;
}

struct SaveOptions {
  int64_t step = 7;
  int ranks = 1, dim = 0;  // each rank has its share of this dimension
  bool optimizer = true;   // two tensors more for each of the model's
  std::map<std::string, std::string> state = {{"samples", "64"}, {"scaler", R"({"scale":2.0})"}};
};

// The bytes of a slice.
inline std::vector<float> part_of(const std::vector<float>& whole,
                                  const formats::ShardSlice& slice) {
  std::vector<float> part(static_cast<size_t>(slice.box.numel()));
  layout::for_each_run(slice.box, layout::Box::whole(slice.shape), slice.box,
                       [&](const layout::ContiguousRun& run) {
                         std::copy_n(whole.begin() + run.from, run.size, part.begin() + run.to);
                       });
  return part;
}

// Float32. Tensors that `values` does not have get known values.
inline std::string save_model(const std::string& dir, const config::TrainConfig& config,
                              Values values, const SaveOptions& options = {}) {
  std::map<std::string, layout::Shape> shapes;
  for (const auto& tensor : config.model.tensors()) {
    shapes[tensor.name] = tensor.shape;
    if (!options.optimizer) continue;
    shapes["optim." + tensor.name + ".exp_avg"] = tensor.shape;
    shapes["optim." + tensor.name + ".step"] = {};
  }
  const std::string folder = formats::begin_checkpoint(dir, options.step);
  formats::Manifest manifest{
      .step = options.step, .state = options.state, .config = config::to_json(config)};
  for (int rank = 0; rank < options.ranks; ++rank) {
    std::map<std::string, formats::ShardSlice> slices;
    for (const auto& [name, shape] : shapes) {
      layout::Box box = layout::Box::whole(shape);
      if (shape.empty()) {
        box.ranges[0].end = rank == 0 ? 1 : 0;
      } else {
        const size_t dim = std::min(shape.size() - 1, static_cast<size_t>(options.dim));
        box.ranges[dim] = layout::balanced_range(shape[dim], options.ranks, rank);
      }
      if (!box.empty()) slices[name] = {name, "F32", shape, box};
    }
    std::vector<formats::ShardSlice> list;
    for (const auto& [name, slice] : slices) list.push_back(slice);
    const std::string file = formats::shard_file_name(rank + 1);
    auto writer = formats::open_shard(folder, file, list);
    const auto entries = writer.entries();
    for (const auto& entry : entries) {
      const auto& slice = slices.at(entry.name);
      auto& whole = values[entry.name];
      if (whole.empty()) whole = known_values(entry.name, layout::numel_of(slice.shape));
      const auto part = part_of(whole, slice);
      writer.write(entry.name, std::as_bytes(std::span(part)));
    }
    manifest.merge(formats::shard_manifest(options.step, file, writer.finish(), list));
  }
  return formats::commit_checkpoint(dir, manifest);
}

}  // namespace lockstep::test
