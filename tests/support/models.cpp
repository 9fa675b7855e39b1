// SPDX-License-Identifier: Apache-2.0
#include "tests/support/models.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <limits>

namespace lockstep::test {
namespace {

constexpr int64_t kClasses = 4;

at::Generator generator(uint64_t seed) {
  // Neighbouring seeds must not start alike.
  return at::detail::createCPUGenerator(seed * 0x9E3779B97F4A7C15u + 1);
}

at::Tensor class_loss(const at::Tensor& output, const Batch& batch) {
  return at::cross_entropy_loss(output.flatten(0, -2), batch.target.flatten());
}

}  // namespace

void fill_parameters(torch::nn::Module& module, uint64_t seed) {
  const at::NoGradGuard no_grad;
  at::Generator source = generator(seed);
  for (auto& item : module.named_parameters()) {
    at::Tensor& parameter = item.value();
    const int64_t fan_in =
        parameter.dim() > 1 ? parameter.numel() / parameter.size(0) : parameter.numel();
    const double bound = 1 / std::sqrt(static_cast<double>(fan_in));
    parameter.uniform_(-bound, bound, source);
    if (parameter.dim() == 1 && item.key().ends_with("weight")) parameter.add_(1);
  }
}

// ---- Mlp ----

MlpImpl::MlpImpl() : first_(12, 32), second_(32, 32), third_(32, kClasses) {
  register_module("first", first_);
  register_module("second", second_);
  register_module("third", third_);
}

at::Tensor MlpImpl::forward(at::Tensor x) { return third_(at::tanh(second_(at::tanh(first_(x))))); }

Mlp MlpTask::make(uint64_t seed) {
  Mlp model;
  fill_parameters(*model, seed);
  return model;
}

Batch MlpTask::batch(int64_t index) {
  const at::Tensor input = at::randn({8, 12}, generator(index));
  return {input, at::sin(input.narrow(1, 0, 4)) + input.narrow(1, 4, 4)};
}

at::Tensor MlpTask::loss(const at::Tensor& output, const Batch& batch) {
  return at::mse_loss(output, batch.target);
}

// ---- ConvNet ----

torch::nn::AnyModule batch_norm(int64_t channels) {
  return torch::nn::AnyModule(torch::nn::BatchNorm2d(channels));
}

ConvNetImpl::ConvNetImpl(const NormFactory& norm)
    : first_(torch::nn::Conv2dOptions(3, 8, 3).padding(1)),
      second_(torch::nn::Conv2dOptions(8, 16, 3).stride(2).padding(1)),
      first_norm_(norm(8)),
      second_norm_(norm(16)),
      head_(16 * 4 * 4, kClasses) {
  register_module("first", first_);
  register_module("first_norm", first_norm_.ptr());
  register_module("second", second_);
  register_module("second_norm", second_norm_.ptr());
  register_module("head", head_);
}

at::Tensor ConvNetImpl::forward(at::Tensor x) {
  x = at::relu(first_norm_.forward(first_(x)));
  x = at::relu(second_norm_.forward(second_(x)));
  return head_(x.flatten(1));
}

ConvNet ConvNetTask::make(uint64_t seed, const NormFactory& norm) {
  ConvNet model(norm);
  fill_parameters(*model, seed);
  return model;
}

Batch ConvNetTask::batch(int64_t index) {
  const at::Tensor input = at::randn({4, 3, 8, 8}, generator(index));
  return {input, input.flatten(1).narrow(1, 0, kClasses).argmax(1)};
}

at::Tensor ConvNetTask::loss(const at::Tensor& output, const Batch& batch) {
  return class_loss(output, batch);
}

// ---- EmbeddingModel ----

EmbeddingModelImpl::EmbeddingModelImpl()
    : embedding_(torch::nn::EmbeddingOptions(100, 16).sparse(true)), head_(16, kClasses) {
  register_module("embedding", embedding_);
  register_module("head", head_);
}

at::Tensor EmbeddingModelImpl::forward(at::Tensor tokens) {
  return head_(embedding_(tokens).mean(1));
}

EmbeddingModel EmbeddingTask::make(uint64_t seed) {
  EmbeddingModel model;
  fill_parameters(*model, seed);
  return model;
}

Batch EmbeddingTask::batch(int64_t index) {
  const at::Tensor tokens = at::randint(100, {6, 5}, generator(index), at::kLong);
  return {tokens, tokens.select(1, 0).remainder(kClasses)};
}

at::Tensor EmbeddingTask::loss(const at::Tensor& output, const Batch& batch) {
  return class_loss(output, batch);
}

// ---- TinyTransformer ----

TransformerBlockImpl::TransformerBlockImpl(const TransformerOptions& options)
    : heads_(options.heads),
      attention_norm_(torch::nn::LayerNormOptions({options.width})),
      mlp_norm_(torch::nn::LayerNormOptions({options.width})),
      qkv_(options.width, 3 * options.width),
      out_(options.width, options.width),
      up_(options.width, 4 * options.width),
      down_(4 * options.width, options.width) {
  register_module("attention_norm", attention_norm_);
  register_module("qkv", qkv_);
  register_module("out", out_);
  register_module("mlp_norm", mlp_norm_);
  register_module("up", up_);
  register_module("down", down_);
}

at::Tensor TransformerBlockImpl::forward(at::Tensor x) {
  const int64_t length = x.size(1), width = x.size(2);
  const auto qkv = qkv_(attention_norm_(x))
                       .view({-1, length, 3, heads_, width / heads_})
                       .permute({2, 0, 3, 1, 4})
                       .unbind(0);  // 3 of (B, H, T, C / H)
  const at::Tensor hidden = at::ones({length, length}, x.options().dtype(at::kBool)).triu(1);
  const at::Tensor scores =
      at::matmul(qkv[0], qkv[1].transpose(-2, -1)) / std::sqrt(static_cast<double>(width / heads_));
  const at::Tensor weights =
      scores.masked_fill(hidden, -std::numeric_limits<double>::infinity()).softmax(-1);
  x = x + out_(at::matmul(weights, qkv[2]).transpose(1, 2).reshape(x.sizes()));
  return x + down_(at::gelu(up_(mlp_norm_(x))));
}

TinyTransformerImpl::TinyTransformerImpl(const TransformerOptions& options)
    : tokens_(options.vocabulary, options.width),
      positions_(options.length, options.width),
      norm_(torch::nn::LayerNormOptions({options.width})) {
  register_module("tokens", tokens_);
  register_module("positions", positions_);
  for (int64_t i = 0; i < options.blocks; ++i) {
    blocks_.push_back(register_module("block" + std::to_string(i), TransformerBlock(options)));
  }
  register_module("norm", norm_);
  if (!options.tied) {
    head_ = register_module(
        "head",
        torch::nn::Linear(torch::nn::LinearOptions(options.width, options.vocabulary).bias(false)));
  }
}

at::Tensor TinyTransformerImpl::forward(at::Tensor tokens) {
  at::Tensor x = tokens_(tokens) + positions_(at::arange(tokens.size(1), tokens.options()));
  for (auto& block : blocks_) x = block(x);
  return at::linear(norm_(x), head_ ? head_->weight : tokens_->weight);
}

TinyTransformer TransformerTask::make(uint64_t seed) {
  TinyTransformer model;
  fill_parameters(*model, seed);
  return model;
}

TinyTransformer TiedTransformerTask::make(uint64_t seed) {
  TinyTransformer model(TransformerOptions{.tied = true});
  fill_parameters(*model, seed);
  return model;
}

Batch TransformerTask::batch(int64_t index) {
  const TransformerOptions options;
  at::Generator source = generator(index);
  const at::Tensor start = at::randint(options.vocabulary, {4, 1}, source, at::kLong);
  const at::Tensor stride = at::randint(1, 4, {4, 1}, source, at::kLong);
  const at::Tensor tokens =
      (start + stride * at::arange(options.length + 1)).remainder(options.vocabulary);
  return {tokens.narrow(1, 0, options.length), tokens.narrow(1, 1, options.length)};
}

at::Tensor TransformerTask::loss(const at::Tensor& output, const Batch& batch) {
  return class_loss(output, batch);
}

}  // namespace lockstep::test
