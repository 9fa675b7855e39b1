// SPDX-License-Identifier: Apache-2.0
// Small models for tests, each with its data and its loss. A task has
//   Model                      the torch module holder
//   make(seed)                 a model whose weights are a function of the seed alone
//   batch(index)               micro-batch `index`, a function of the index alone; all are of one
//   size loss(output, batch)        the mean over the micro-batch, so that equal micro-batches
//   average
// so that one templated test covers all of them. Nothing here draws from torch's global generator
// once the modules are built: thread ranks get the same weights and batches as processes do.
#pragma once

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace lockstep::test {

struct Batch {
  at::Tensor input, target;
};

// Gives all parameters values that depend on the seed and their order only: uniform with the bound
// 1 / sqrt(fan in), weights of norms near one.
void fill_parameters(torch::nn::Module& module, uint64_t seed);

// ---- three linear layers ----

class MlpImpl : public torch::nn::Module {
 public:
  MlpImpl();
  at::Tensor forward(at::Tensor x);  // (B, 12) -> (B, 4)

 private:
  torch::nn::Linear first_, second_, third_;
};
TORCH_MODULE(Mlp);

struct MlpTask {
  using Model = Mlp;
  static Mlp make(uint64_t seed = 0);
  static Batch batch(int64_t index);
  static at::Tensor loss(const at::Tensor& output, const Batch& batch);
};

// ---- convolutions with a norm of choice ----

// Makes the norm over this many channels; any module that maps (B, C, H, W) to the same.
using NormFactory = std::function<torch::nn::AnyModule(int64_t channels)>;
torch::nn::AnyModule batch_norm(int64_t channels);

class ConvNetImpl : public torch::nn::Module {
 public:
  explicit ConvNetImpl(const NormFactory& norm = batch_norm);
  at::Tensor forward(at::Tensor x);  // (B, 3, 8, 8) -> (B, 4)

 private:
  torch::nn::Conv2d first_, second_;
  torch::nn::AnyModule first_norm_, second_norm_;
  torch::nn::Linear head_;
};
TORCH_MODULE(ConvNet);

struct ConvNetTask {
  using Model = ConvNet;
  static ConvNet make(uint64_t seed = 0, const NormFactory& norm = batch_norm);
  static Batch batch(int64_t index);
  static at::Tensor loss(const at::Tensor& output, const Batch& batch);
};

// ---- an embedding with sparse gradients ----

class EmbeddingModelImpl : public torch::nn::Module {
 public:
  EmbeddingModelImpl();
  at::Tensor forward(at::Tensor tokens);  // (B, T) -> (B, 4)

 private:
  torch::nn::Embedding embedding_;
  torch::nn::Linear head_;
};
TORCH_MODULE(EmbeddingModel);

struct EmbeddingTask {
  using Model = EmbeddingModel;
  static EmbeddingModel make(uint64_t seed = 0);
  static Batch batch(int64_t index);  // reaches a part of the rows only
  static at::Tensor loss(const at::Tensor& output, const Batch& batch);
};

// ---- a language model ----

struct TransformerOptions {
  int64_t vocabulary = 50, width = 32, heads = 2, blocks = 2, length = 12;
  bool tied = false;  // the head is the token embedding
};

class TransformerBlockImpl : public torch::nn::Module {
 public:
  explicit TransformerBlockImpl(const TransformerOptions& options);
  at::Tensor forward(at::Tensor x);  // (B, T, C) -> (B, T, C)

 private:
  int64_t heads_;
  torch::nn::LayerNorm attention_norm_, mlp_norm_;
  torch::nn::Linear qkv_, out_, up_, down_;
};
TORCH_MODULE(TransformerBlock);

class TinyTransformerImpl : public torch::nn::Module {
 public:
  explicit TinyTransformerImpl(const TransformerOptions& options = {});
  at::Tensor forward(at::Tensor tokens);  // (B, T) -> (B, T, vocabulary)

 private:
  torch::nn::Embedding tokens_, positions_;
  std::vector<TransformerBlock> blocks_;
  torch::nn::LayerNorm norm_;
  torch::nn::Linear head_{nullptr};  // empty when tied
};
TORCH_MODULE(TinyTransformer);

struct TransformerTask {
  using Model = TinyTransformer;
  static TinyTransformer make(uint64_t seed = 0);
  static Batch batch(int64_t index);
  static at::Tensor loss(const at::Tensor& output, const Batch& batch);
};

struct TiedTransformerTask : TransformerTask {
  static TinyTransformer make(uint64_t seed = 0);
};

}  // namespace lockstep::test
