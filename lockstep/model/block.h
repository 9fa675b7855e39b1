// SPDX-License-Identifier: Apache-2.0
// A layer of a language model: attention, then MLP, each with a norm before it and a residual
// connection around it.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "lockstep/config/model/model_spec.h"
#include "lockstep/model/decoding.h"
#include "lockstep/nn/dropout.h"
#include "lockstep/nn/embedding.h"
#include "lockstep/nn/linear.h"

namespace lockstep::model {

using Norm = std::function<at::Tensor(const at::Tensor&)>;

// Makes modules with the shapes that the spec gives to the tensors of these names, and registers
// them at their place: shapes are written in the spec alone.
class Parts {
 public:
  Parts(const config::ModelSpec& spec, at::TensorOptions tensors);

  nn::Linear linear(torch::nn::Module& parent, const std::string& prefix, const std::string& name);
  nn::Embedding embedding(torch::nn::Module& parent, const std::string& name);
  Norm norm(torch::nn::Module& parent, const std::string& prefix, const std::string& name);

  const config::ModelSpec& spec() const { return spec_; }
  at::TensorOptions tensors() const { return tensors_; }

 private:
  const layout::Shape& shape(const std::string& name) const;

  const config::ModelSpec& spec_;
  at::TensorOptions tensors_;
  std::map<std::string, layout::Shape> shapes_;
};

class AttentionImpl : public torch::nn::Module {
 public:
  AttentionImpl(Parts& parts, int64_t layer, const std::string& prefix);

  // (B, T, C) -> (B, T, C). The rotation is undefined where positions are learned. With sequence
  // parallelism, x and the result are this rank's part of T. While texts are generated, x is
  // (1, N, C) of the tokens of `decoding`, and the rotation has their positions.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& rotation, Decoding* decoding = nullptr);

 private:
  int64_t layer_, heads_, kv_heads_, window_;
  nn::Linear qkv_, out_{nullptr};
  Norm q_norm_, k_norm_;  // none without qk_norm
};
TORCH_MODULE(Attention);

class MlpImpl : public torch::nn::Module {
 public:
  MlpImpl(Parts& parts, const std::string& prefix);

  at::Tensor forward(const at::Tensor& x);

 private:
  bool gated_;
  nn::Linear up_, down_;  // up is gate and up where it is gated
};
TORCH_MODULE(Mlp);

class BlockImpl : public torch::nn::Module {
 public:
  BlockImpl(Parts& parts, int64_t layer);

  at::Tensor forward(const at::Tensor& x, const at::Tensor& rotation, Decoding* decoding = nullptr);

 private:
  Norm norm1_, norm2_;
  Attention attention_{nullptr};
  Mlp mlp_{nullptr};
  nn::Dropout dropout1_, dropout2_;
};
TORCH_MODULE(Block);

}  // namespace lockstep::model
