// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/tensor_parallel.h"

#include "lockstep/config/float8.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::config {

using layout::TensorStyle;

layout::TensorPlan tensor_plan(const ModelSpec& model) {
  const int64_t heads = model.heads, kv_heads = model.num_kv_heads(), ffn = model.ffn_size();
  layout::TensorPlan plan{
      {"embed", TensorStyle::vocab},
      {"dropout", TensorStyle::sequence},
      {"blocks.*.norm?", TensorStyle::sequence},
      {"blocks.*.dropout?", TensorStyle::sequence},
      {"blocks.*.attention.qkv", TensorStyle::column, {heads, kv_heads, kv_heads}},
      {"blocks.*.attention.out", TensorStyle::row, {heads}},
      {"blocks.*.mlp.down", TensorStyle::row},
      {"norm", TensorStyle::sequence}};
  if (model.kind == ModelKind::gpt) {
    plan.push_back({"positions", TensorStyle::sequence});
    plan.push_back({"blocks.*.mlp.up", TensorStyle::column});
  } else {
    plan.push_back({"blocks.*.mlp.gate_up", TensorStyle::column, {ffn, ffn}});
  }
  if (model.qk_norm) plan.push_back({"blocks.*.attention.?_norm", TensorStyle::partial});
  if (!model.is_tied()) plan.push_back({"head", TensorStyle::vocab});
  return plan;
}

layout::TensorSplit tensor_split(const ModelSpec& model, const TensorSpec& tensor, int tp,
                                 int rank) {
  const layout::TensorPlan plan = tensor_plan(model);
  const size_t dot = tensor.name.rfind('.');
  const std::string module = tensor.name.substr(0, dot), parameter = tensor.name.substr(dot + 1);
  const int rule = layout::match(plan, std::vector{module})[0];
  check(rule >= 0, "a tensor of the model is not in its tensor-parallel plan");
  return layout::split_of(plan[static_cast<size_t>(rule)], module, parameter, tensor.shape, tp,
                          rank);
}

void validate_tensor(const TrainConfig& config, const ModelSpec& model) {
  const int tp = config.parallel.tp;
  const auto require = [&](const char* what, int64_t size) {
    if (size % tp == 0) return;
    throw ConfigError(format("{} is {}, must be divisible by parallel.tp {}", what, size, tp));
  };
  if (config.parallel.sequence_parallel) {
    if (tp == 1)
      throw ConfigError("parallel.sequence_parallel is true, but parallel.tp is 1: leave it out");
    require(config.parallel.cp > 1 ? "train.seq_len / parallel.cp" : "train.seq_len",
            config.train.seq_len / config.parallel.cp);
  }
  require("model.heads", model.heads);
  require("model.kv_heads", model.num_kv_heads());
  require("model.ffn", model.ffn_size());
  if (model.vocab > 0 && model.vocab < tp) {
    throw ConfigError(
        format("model.vocab is {}, must be at least parallel.tp {}", model.vocab, tp));
  }
  float8_layers(config, model);
}

}  // namespace lockstep::config
