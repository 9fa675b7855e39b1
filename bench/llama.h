// SPDX-License-Identifier: Apache-2.0
// A language model in the style of Llama, the same as in torch_ddp.py, for benchmarks: RMS norms,
// fused qkv, gated SiLU, no biases, no positions, untied head. Weights and tokens are functions of
// their indices in whole numbers, so that programs in other languages can make the very same ones.
#pragma once

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <vector>

namespace lockstep::bench {

struct LlamaOptions {
  int64_t layers = 8, width = 768, heads = 12, ffn = 2048, vocabulary = 8192;
};

class RmsNormImpl : public torch::nn::Module {
 public:
  explicit RmsNormImpl(int64_t width);
  at::Tensor forward(const at::Tensor& x);

 private:
  at::Tensor weight_;
};
TORCH_MODULE(RmsNorm);

class LlamaBlockImpl : public torch::nn::Module {
 public:
  explicit LlamaBlockImpl(const LlamaOptions& options);
  at::Tensor forward(const at::Tensor& x);  // (B, T, C) -> (B, T, C)

 private:
  int64_t heads_;
  RmsNorm norm1_, norm2_;
  torch::nn::Linear qkv_, out_, gate_, up_, down_;
};
TORCH_MODULE(LlamaBlock);

class LlamaImpl : public torch::nn::Module {
 public:
  explicit LlamaImpl(const LlamaOptions& options);
  // Mean cross entropy of (B, T) tokens against (B, T) targets.
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& targets);

 private:
  torch::nn::Embedding embed_;
  std::vector<LlamaBlock> blocks_;
  RmsNorm norm_;
  torch::nn::Linear head_;
};
TORCH_MODULE(Llama);

// Each rank has its own; targets are the next tokens.
struct Tokens {
  at::Tensor input, target;  // (batch, length)
};
Tokens make_tokens(int64_t batch, int64_t length, int64_t vocabulary, int rank);

}  // namespace lockstep::bench
