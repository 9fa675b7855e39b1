// SPDX-License-Identifier: Apache-2.0
#include "bench/llama.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/version.h>

#include <cmath>
#include <limits>

namespace lockstep::bench {
namespace {

constexpr double kEpsilon = 1e-5;

// Whole numbers in [0, 65521), without a pattern that a matrix product would see.
at::Tensor noise(int64_t count, int64_t seed) {
  constexpr int64_t kPrime = 65521;
  const at::Tensor index = at::arange(count, at::kLong);
  const at::Tensor x = (index * 40503 + seed * 977 + 1).remainder(kPrime);
  return (x * x + index.bitwise_right_shift(8) * 31).remainder(kPrime).square().remainder(kPrime);
}

// (B, H, T, C / H) each
at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
#if TORCH_VERSION_MAJOR >= 2
  return at::scaled_dot_product_attention(q, k, v, {}, 0.0, true);
#else
  const at::Tensor hidden = at::ones({q.size(2), q.size(2)}, at::kBool).triu(1);
  const at::Tensor scores =
      at::matmul(q, k.transpose(-2, -1)) / std::sqrt(static_cast<double>(q.size(-1)));
  return at::matmul(
      scores.masked_fill(hidden, -std::numeric_limits<double>::infinity()).softmax(-1), v);
#endif
}

torch::nn::Linear linear(int64_t from, int64_t to) {
  return torch::nn::Linear(torch::nn::LinearOptions(from, to).bias(false));
}

}  // namespace

RmsNormImpl::RmsNormImpl(int64_t width)
    : weight_(register_parameter("weight", at::ones({width}))) {}

at::Tensor RmsNormImpl::forward(const at::Tensor& x) {
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 4)
  return at::rms_norm(x, {x.size(-1)}, weight_, kEpsilon);
#else
  return x * at::rsqrt(x.square().mean(-1, true) + kEpsilon) * weight_;
#endif
}

LlamaBlockImpl::LlamaBlockImpl(const LlamaOptions& options)
    : heads_(options.heads),
      norm1_(register_module("norm1", RmsNorm(options.width))),
      norm2_(register_module("norm2", RmsNorm(options.width))),
      qkv_(register_module("qkv", linear(options.width, 3 * options.width))),
      out_(register_module("out", linear(options.width, options.width))),
      gate_(register_module("gate", linear(options.width, options.ffn))),
      up_(register_module("up", linear(options.width, options.ffn))),
      down_(register_module("down", linear(options.ffn, options.width))) {}

at::Tensor LlamaBlockImpl::forward(const at::Tensor& x) {
  const auto qkv = qkv_(norm1_(x))
                       .view({x.size(0), x.size(1), 3, heads_, x.size(2) / heads_})
                       .permute({2, 0, 3, 1, 4})
                       .unbind(0);
  const at::Tensor attention = causal_attention(qkv[0], qkv[1], qkv[2]);
  const at::Tensor y = x + out_(attention.transpose(1, 2).reshape(x.sizes()));
  const at::Tensor z = norm2_(y);
  return y + down_(at::silu(gate_(z)) * up_(z));
}

LlamaImpl::LlamaImpl(const LlamaOptions& options)
    : embed_(options.vocabulary, options.width),
      norm_(options.width),
      head_(linear(options.width, options.vocabulary)) {
  register_module("embed", embed_);
  for (int64_t i = 0; i < options.layers; ++i) {
    blocks_.push_back(register_module("block" + std::to_string(i), LlamaBlock(options)));
  }
  register_module("norm", norm_);
  register_module("head", head_);

  const at::NoGradGuard no_grad;
  int64_t seed = 0;
  for (at::Tensor& parameter : parameters()) {
    ++seed;
    if (parameter.dim() == 1) continue;
    const at::Tensor values = (noise(parameter.numel(), seed).to(at::kFloat) - 32760) * 1e-6;
    parameter.copy_(values.view(parameter.sizes()));
  }
}

at::Tensor LlamaImpl::forward(const at::Tensor& tokens, const at::Tensor& targets) {
  at::Tensor x = embed_(tokens);
  for (auto& block : blocks_) x = block(x);
  const at::Tensor logits = head_(norm_(x));
  return at::cross_entropy_loss(logits.flatten(0, 1), targets.flatten());
}

Tokens make_tokens(int64_t batch, int64_t length, int64_t vocabulary, int rank) {
  const at::Tensor all = noise(batch * (length + 1), 1'000'000 + rank).remainder(vocabulary);
  const at::Tensor rows = all.view({batch, length + 1});
  return {rows.narrow(1, 0, length).contiguous(), rows.narrow(1, 1, length).contiguous()};
}

}  // namespace lockstep::bench
