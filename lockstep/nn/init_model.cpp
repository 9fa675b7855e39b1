// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/init_model.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/functional/instancenorm.h>  // modules/instancenorm.h forgets it
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/instancenorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>
#include <torch/nn/modules/transformer.h>

#include <cmath>
#include <map>
#include <optional>
#include <set>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/nn/embedding.h"
#include "lockstep/nn/linear.h"
#include "lockstep/nn/norm.h"
#include "lockstep/nn/sync_batch_norm.h"

namespace lockstep::nn {
namespace {

namespace torch_nn = torch::nn;
using torch_nn::Module;

// How a parameter begins: a distribution, and its constant, bound or deviation where it has one.
struct Start {
  enum class Kind : uint8_t { constant, uniform, normal, xavier_uniform, xavier_normal };
  Kind kind = Kind::constant;
  double value = 0;
};
using Kind = Start::Kind;

void apply(const Start& start, const at::Tensor& parameter, const init::Source& source) {
  switch (start.kind) {
    case Kind::constant:
      return init::constant_(parameter, start.value);
    case Kind::uniform:
      return init::uniform_(parameter, source, {.low = -start.value, .high = start.value});
    case Kind::normal:
      return init::normal_(parameter, source, {.std = start.value});
    case Kind::xavier_uniform:
      return init::xavier_uniform_(parameter, source);
    case Kind::xavier_normal:
      return init::xavier_normal_(parameter, source);
  }
}

template <class... Types>
bool is_one_of(const Module& module) {
  return (... || (module.as<Types>() != nullptr));
}

// Inputs that each output of the module adds up; what torch bounds its uniform values by.
template <class... Types>
int64_t hidden_size(const Module& module) {
  int64_t size = 0;
  (..., (module.as<Types>() ? (size = module.as<Types>()->options.hidden_size()) : 0));
  return size;
}

std::optional<int64_t> fan_in(const Module& module) {
  if (is_one_of<LinearImpl, torch_nn::LinearImpl, torch_nn::Conv1dImpl, torch_nn::Conv2dImpl,
                torch_nn::Conv3dImpl, torch_nn::ConvTranspose1dImpl, torch_nn::ConvTranspose2dImpl,
                torch_nn::ConvTranspose3dImpl>(module)) {
    const at::Tensor weight = module.named_parameters(/*recurse=*/false)["weight"];
    return layout::numel_of({weight.sizes().begin() + 1, weight.sizes().end()});
  }
  if (const auto* bilinear = module.as<torch_nn::BilinearImpl>()) return bilinear->weight.size(1);
  const auto hidden =
      hidden_size<torch_nn::RNNImpl, torch_nn::LSTMImpl, torch_nn::GRUImpl, torch_nn::RNNCellImpl,
                  torch_nn::LSTMCellImpl, torch_nn::GRUCellImpl>(module);
  return hidden > 0 ? std::optional(hidden) : std::nullopt;
}

// How `name` of a module begins, as torch has it; nothing for a module that is not known.
std::optional<Start> start_of(const Module& module, const std::string& name) {
  if (const auto fan = fan_in(module)) {
    return Start{Kind::uniform, *fan > 0 ? 1 / std::sqrt(static_cast<double>(*fan)) : 0};
  }
  if (is_one_of<EmbeddingImpl, torch_nn::EmbeddingImpl, torch_nn::EmbeddingBagImpl>(module)) {
    return Start{Kind::normal, 1};
  }
  if (is_one_of<torch_nn::BatchNorm1dImpl, torch_nn::BatchNorm2dImpl, torch_nn::BatchNorm3dImpl,
                torch_nn::InstanceNorm1dImpl, torch_nn::InstanceNorm2dImpl,
                torch_nn::InstanceNorm3dImpl, torch_nn::LayerNormImpl, torch_nn::GroupNormImpl,
                LayerNormImpl, RmsNormImpl, SyncBatchNormImpl>(module)) {
    return Start{Kind::constant, name == "weight" ? 1.0 : 0.0};
  }
  if (const auto* prelu = module.as<torch_nn::PReLUImpl>()) {
    return Start{Kind::constant, prelu->options.init()};
  }
  if (is_one_of<torch_nn::MultiheadAttentionImpl>(module)) {
    if (name == "in_proj_bias") return Start{Kind::constant, 0};
    return Start{name.starts_with("bias_") ? Kind::xavier_normal : Kind::xavier_uniform};
  }
  return std::nullopt;
}

// Where a module has its own wishes for the parameters of modules inside it: by path.
void add_wishes(const Module& module, const std::string& path,
                std::map<std::string, Start>& wishes) {
  const std::string prefix = path.empty() ? "" : path + ".";
  if (is_one_of<torch_nn::TransformerImpl>(module)) {
    for (const auto& item : module.named_parameters()) {
      if (item.value().dim() > 1) wishes[prefix + item.key()] = {Kind::xavier_uniform};
    }
  }
  if (is_one_of<torch_nn::MultiheadAttentionImpl>(module)) {
    wishes[prefix + "out_proj.bias"] = {Kind::constant, 0};
  }
}

// Rows that stand for padding are zero.
void clear_padding(const Module& module) {
  const at::NoGradGuard no_grad;
  const auto clear = [](const auto* embedding) {
    if (!embedding || !embedding->options.padding_idx()) return;
    embedding->weight.select(0, *embedding->options.padding_idx()).zero_();
  };
  clear(module.as<torch_nn::EmbeddingImpl>());
  clear(module.as<torch_nn::EmbeddingBagImpl>());
}

}  // namespace

void initialize(Module& model, uint64_t seed, const InitializeOptions& options) {
  std::set<const c10::TensorImpl*> done;
  std::map<std::string, Start> wishes;
  model.apply([&](const std::string& path, Module& module) {
    add_wishes(module, path, wishes);
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      const at::Tensor& parameter = item.value();
      if (!parameter.defined() || !done.insert(parameter.unsafeGetTensorImpl()).second) continue;
      const std::string place = path.empty() ? item.key() : path + "." + item.key();
      const init::Source source{.seed = seed, .name = options.prefix + place};
      if (options.rule && options.rule(parameter, source)) continue;
      const auto wish = wishes.find(place);
      const auto start = wish != wishes.end() ? wish->second : start_of(module, item.key());
      if (!start) {
        throw ConfigError(
            format("[initialize] parameter '{}' of a {} has no known initializer; give it one in "
                   "InitializeOptions::rule",
                   source.name, module.name()));
      }
      apply(*start, parameter, source);
      clear_padding(module);
    }
  });
}

}  // namespace lockstep::nn
