// SPDX-License-Identifier: Apache-2.0
#include "lockstep/model/block.h"

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/nn/activations.h"
#include "lockstep/nn/attention.h"
#include "lockstep/nn/attention_heads.h"
#include "lockstep/nn/norm.h"

namespace lockstep::model {

using config::ModelKind;

Parts::Parts(const config::ModelSpec& spec, at::TensorOptions tensors)
    : spec_(spec), tensors_(tensors) {
  for (const config::TensorSpec& tensor : spec.tensors()) shapes_[tensor.name] = tensor.shape;
}

const layout::Shape& Parts::shape(const std::string& name) const {
  const auto found = shapes_.find(name);
  check(found != shapes_.end(), "a model has a tensor that its spec does not have");
  return found->second;
}

nn::Linear Parts::linear(torch::nn::Module& parent, const std::string& prefix,
                         const std::string& name) {
  const layout::Shape& weight = shape(prefix + name + ".weight");
  const bool bias = shapes_.contains(prefix + name + ".bias");
  return parent.register_module(
      name, nn::Linear(weight[1], weight[0], {.bias = bias, .tensors = tensors_}));
}

nn::Embedding Parts::embedding(torch::nn::Module& parent, const std::string& name) {
  const layout::Shape& weight = shape(name + ".weight");
  return parent.register_module(name, nn::Embedding(weight[0], weight[1], tensors_));
}

Norm Parts::norm(torch::nn::Module& parent, const std::string& prefix, const std::string& name) {
  const int64_t width = shape(prefix + name + ".weight")[0];
  const nn::NormOptions options{.epsilon = spec_.norm_epsilon, .tensors = tensors_};
  if (shapes_.contains(prefix + name + ".bias")) {
    return [norm = parent.register_module(name, nn::LayerNorm(width, options))](
               const at::Tensor& x) mutable { return norm->forward(x); };
  }
  return [norm = parent.register_module(name, nn::RmsNorm(width, options))](
             const at::Tensor& x) mutable { return norm->forward(x); };
}

AttentionImpl::AttentionImpl(Parts& parts, int64_t layer, const std::string& prefix)
    : layer_(layer),
      heads_(parts.spec().heads),
      kv_heads_(parts.spec().num_kv_heads()),
      window_(parts.spec().window),
      qkv_(parts.linear(*this, prefix, "qkv")) {
  // In the order of ModelSpec::tensors().
  if (parts.spec().qk_norm) {
    q_norm_ = parts.norm(*this, prefix, "q_norm");
    k_norm_ = parts.norm(*this, prefix, "k_norm");
  }
  out_ = parts.linear(*this, prefix, "out");
}

at::Tensor AttentionImpl::forward(const at::Tensor& x, const at::Tensor& rotation,
                                  Decoding* decoding) {
  const int64_t ranks = qkv_->ranks();
  const auto [q, k, v] = nn::split_heads(qkv_(x), {.heads = heads_ / ranks,
                                                   .kv_heads = kv_heads_ / ranks,
                                                   .rotation = rotation,
                                                   .q_norm = q_norm_,
                                                   .k_norm = k_norm_});
  const at::Tensor mixed = decoding != nullptr ? decoding->attend(layer_, q, k, v, window_)
                                               : nn::causal_attention(q, k, v, window_);
  return out_(mixed.transpose(1, 2).flatten(2));  // (B, T, H, D)
}

MlpImpl::MlpImpl(Parts& parts, const std::string& prefix)
    : gated_(parts.spec().kind == ModelKind::llama),
      up_(parts.linear(*this, prefix, gated_ ? "gate_up" : "up")),
      down_(parts.linear(*this, prefix, "down")) {}

at::Tensor MlpImpl::forward(const at::Tensor& x) {
  const at::Tensor inner = up_(x);
  return down_(gated_ ? nn::swiglu(inner) : nn::gelu(inner));
}

BlockImpl::BlockImpl(Parts& parts, int64_t layer) {
  const std::string prefix = format("blocks.{}.", layer);
  const double dropout = parts.spec().dropout;
  norm1_ = parts.norm(*this, prefix, "norm1");
  attention_ = register_module("attention", Attention(parts, layer, prefix + "attention."));
  dropout1_ = register_module("dropout1", nn::Dropout(dropout));
  norm2_ = parts.norm(*this, prefix, "norm2");
  mlp_ = register_module("mlp", Mlp(parts, prefix + "mlp."));
  dropout2_ = register_module("dropout2", nn::Dropout(dropout));
}

at::Tensor BlockImpl::forward(const at::Tensor& x, const at::Tensor& rotation, Decoding* decoding) {
  const at::Tensor y = x + dropout1_(attention_(norm1_(x), rotation, decoding));
  return y + dropout2_(mlp_(norm2_(y)));
}

}  // namespace lockstep::model
