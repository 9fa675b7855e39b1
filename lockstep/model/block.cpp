// SPDX-License-Identifier: Apache-2.0
#include "lockstep/model/block.h"

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/nn/activations.h"
#include "lockstep/nn/attention.h"
#include "lockstep/nn/attention_heads.h"
#include "lockstep/parallel/recompute/recompute.h"

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
  if (shapes_.contains(prefix + name + ".bias"))
    return {parent.register_module(name, nn::LayerNorm(width, options).ptr()), options.epsilon};
  return {parent.register_module(name, nn::RmsNorm(width, options).ptr()), options.epsilon};
}

nn::FusedLinear fused(const at::Tensor& weight, const at::Tensor& bias, const Norm& norm) {
  return {.weight = weight,
          .bias = bias,
          .norm_weight = norm.weight(),
          .norm_bias = norm.bias(),
          .epsilon = norm.epsilon()};
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

at::Tensor AttentionImpl::attend_new(const at::Tensor& qkv, const at::Tensor& rotation,
                                     Decoding& decoding) const {
  const int64_t ranks = qkv_->ranks();
  return decoding.attend_new(layer_, qkv,
                             {.heads = heads_ / ranks,
                              .kv_heads = kv_heads_ / ranks,
                              .rotation = rotation,
                              .q_norm = q_norm_.weight(),
                              .k_norm = k_norm_.weight(),
                              .epsilon = q_norm_.epsilon()});
}

at::Tensor AttentionImpl::forward(const at::Tensor& x, const at::Tensor& rotation,
                                  Decoding* decoding, const nn::Documents* documents,
                                  const at::Tensor& around) {
  const at::Tensor rows = qkv_(x);
  // Packed rows are one long row, in which each begins another document.
  const at::Tensor qkv = documents != nullptr ? rows.reshape({1, -1, rows.size(2)}) : rows;
  const auto project = [&](const at::Tensor& joined) {
    return around.defined() ? out_->add_to(around, joined) : out_(joined);
  };
  if (decoding != nullptr && decoding->are_new())
    return project(attend_new(qkv, rotation, *decoding));
  const int64_t ranks = qkv_->ranks();
  nn::HeadOptions options{.heads = heads_ / ranks,
                          .kv_heads = kv_heads_ / ranks,
                          .rotation = rotation,
                          .overwrite = true};
  if (q_norm_) {
    options.q_norm = q_norm_;
    options.k_norm = k_norm_;
  }
  const auto [q, k, v] = nn::split_heads(qkv, options);
  const at::Tensor mixed = decoding != nullptr    ? decoding->attend(layer_, q, k, v)
                           : documents != nullptr ? nn::document_attention(q, k, v, *documents)
                                                  : nn::causal_attention(q, k, v, window_);
  const at::Tensor joined = mixed.transpose(1, 2).flatten(2);  // (B, T, H * D)
  return project(documents != nullptr ? joined.reshape({rows.size(0), rows.size(1), -1}) : joined);
}

at::Tensor AttentionImpl::add_to(const at::Tensor& x, const Norm& norm, const at::Tensor& rotation,
                                 Decoding& decoding) {
  const at::Tensor qkv = nn::fused_linear(x, fused(qkv_->weight, qkv_->bias, norm));
  nn::FusedLinear out = fused(out_->weight, out_->bias);
  out.residual = x;
  return nn::fused_linear(attend_new(qkv, rotation, decoding), out);
}

MlpImpl::MlpImpl(Parts& parts, const std::string& prefix)
    : gated_(parts.spec().kind == ModelKind::llama),
      up_(parts.linear(*this, prefix, gated_ ? "gate_up" : "up")),
      down_(parts.linear(*this, prefix, "down")) {}

at::Tensor MlpImpl::forward(const at::Tensor& x, const at::Tensor& around) {
  const at::Tensor up = up_(x), inner = gated_ ? nn::swiglu(up) : nn::gelu(up);
  return around.defined() ? down_->add_to(around, inner) : down_(inner);
}

at::Tensor MlpImpl::add_to(const at::Tensor& x, const Norm& norm) {
  using Activation = nn::FusedLinear::Activation;
  nn::FusedLinear up = fused(up_->weight, up_->bias, norm),
                  down = fused(down_->weight, down_->bias);
  up.activation = gated_ ? Activation::swiglu : Activation::gelu;
  down.residual = x;
  return nn::fused_linear(nn::fused_linear(x, up), down);
}

BlockImpl::BlockImpl(Parts& parts, int64_t layer, int64_t tile) : tile_(tile) {
  const std::string prefix = format("blocks.{}.", layer);
  const double dropout = parts.spec().dropout;
  norm1_ = parts.norm(*this, prefix, "norm1");
  attention_ = register_module("attention", Attention(parts, layer, prefix + "attention."));
  dropout1_ = register_module("dropout1", nn::Dropout(dropout));
  norm2_ = parts.norm(*this, prefix, "norm2");
  mlp_ = register_module("mlp", Mlp(parts, prefix + "mlp."));
  dropout2_ = register_module("dropout2", nn::Dropout(dropout));
}

at::Tensor BlockImpl::forward(const at::Tensor& x, const at::Tensor& rotation, Decoding* decoding,
                              const nn::Documents* documents) {
  if (decoding != nullptr && decoding->are_new() && nn::can_fuse(x) && !attention_->is_shared())
    return mlp_->add_to(attention_->add_to(x, norm1_, rotation, *decoding), norm2_);
  const auto [in, around] = norm1_.fork(x);
  const auto drops = [](const nn::Dropout& dropout) {
    return dropout->p() > 0 && dropout->is_training();
  };
  const at::Tensor y = drops(dropout1_)
                           ? around + dropout1_(attention_(in, rotation, decoding, documents))
                           : attention_(in, rotation, decoding, documents, around);
  if (tile_ == 0 || decoding != nullptr || y.size(1) <= tile_) {
    const auto [inner, past] = norm2_.fork(y);
    return drops(dropout2_) ? past + dropout2_(mlp_(inner)) : mlp_(inner, past);
  }
  const auto path = [norm = norm2_, mlp = mlp_](const at::Tensor& part, int64_t) mutable {
    return mlp(norm(part));
  };
  return y + dropout2_(parallel::in_tiles(path, y, {.dim = 1, .size = tile_}));
}

}  // namespace lockstep::model
