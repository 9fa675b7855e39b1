// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/float8.h"

#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::config {
namespace {

constexpr int64_t kMultiple = 16;  // nn::kFloat8Multiple
constexpr const char* kNames[] = {"float32", "bfloat16"};

struct BlockProduct {
  std::string name;
  int64_t outputs, inputs;
  bool by_inputs;  // tensor-parallel ranks share the inputs
};

std::vector<BlockProduct> products_of(const ModelSpec& model) {
  const int64_t heads = model.heads * model.head_size(), ffn = model.ffn_size();
  const int64_t keys = model.num_kv_heads() * model.head_size();
  const bool gated = model.kind == ModelKind::llama;
  return {{"attention.qkv", heads + 2 * keys, model.hidden, false},
          {"attention.out", model.hidden, heads, true},
          {gated ? "mlp.gate_up" : "mlp.up", gated ? 2 * ffn : ffn, model.hidden, false},
          {"mlp.down", model.hidden, ffn, true}};
}

bool fits(int64_t outputs, int64_t inputs) {
  return outputs % kMultiple == 0 && inputs % kMultiple == 0;
}

}  // namespace

std::set<std::string> float8_layers(const TrainConfig& config, const ModelSpec& model) {
  const RunConfig& train = config.train;
  if (train.precision && *train.precision != Precision::fp8 && train.precision != train.dtype &&
      train.dtype) {
    throw ConfigError(format("train.precision is {}, but train.dtype is {}: leave one of them out",
                             kNames[static_cast<int>(*train.precision)],
                             kNames[static_cast<int>(*train.dtype)]));
  }
  if (!train.is_fp8()) {
    if (!train.fp8_min) return {};
    throw ConfigError(format("train.fp8_min is {}, but train.precision is not fp8: leave it out",
                             *train.fp8_min));
  }
  const int64_t least = train.fp8_min.value_or(kFp8Min), tp = config.parallel.tp;
  std::set<std::string> layers;
  for (const BlockProduct& product : products_of(model)) {
    if (product.outputs < least || product.inputs < least) continue;
    if (!fits(product.outputs, product.inputs)) {
      if (least > 0) continue;
      throw ConfigError(
          format("train.fp8_min is 0, which wants every product in fp8, but {} is {} x {}, must be "
                 "multiples of {}; a larger train.fp8_min leaves it in the type of train.dtype",
                 product.name, product.outputs, product.inputs, kMultiple));
    }
    const int64_t outputs = product.outputs / (product.by_inputs ? 1 : tp),
                  inputs = product.inputs / (product.by_inputs ? tp : 1);
    if (!fits(outputs, inputs)) {
      throw ConfigError(
          format("train.precision is fp8, but {}, {} x {}, is {} x {} on each of parallel.tp {} "
                 "ranks, must be multiples of {}",
                 product.name, product.outputs, product.inputs, outputs, inputs, tp, kMultiple));
    }
    layers.insert(product.name);
  }
  if (layers.empty()) {
    throw ConfigError(
        format("train.precision is fp8, but no product of a block with model.hidden {} has both "
               "sizes at least train.fp8_min {} and multiples of {}; set train.fp8_min lower, or "
               "train.precision bfloat16",
               model.hidden, least, kMultiple));
  }
  return layers;
}

}  // namespace lockstep::config
