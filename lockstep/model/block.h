// SPDX-License-Identifier: Apache-2.0
// A layer of a language model: attention, then MLP, each with a norm before it and a residual
// connection around it.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "lockstep/config/model/model_spec.h"
#include "lockstep/model/decoding.h"
#include "lockstep/nn/document_attention.h"
#include "lockstep/nn/dropout.h"
#include "lockstep/nn/embedding.h"
#include "lockstep/nn/kernels/linear_map.h"
#include "lockstep/nn/linear.h"
#include "lockstep/nn/norm.h"

namespace lockstep::model {

// nn::LayerNorm where it has a bias, nn::RmsNorm elsewhere.
class Norm {
 public:
  Norm() = default;
  Norm(std::shared_ptr<nn::LayerNormImpl> layer, double epsilon)
      : layer_(std::move(layer)), epsilon_(epsilon) {}
  Norm(std::shared_ptr<nn::RmsNormImpl> rms, double epsilon)
      : rms_(std::move(rms)), epsilon_(epsilon) {}

  explicit operator bool() const { return layer_ || rms_; }
  at::Tensor operator()(const at::Tensor& x) const {
    return layer_ ? layer_->forward(x) : rms_->forward(x);
  }
  // As nn::RmsNormImpl::fork().
  nn::RmsNormImpl::Fork fork(const at::Tensor& x) const {
    if (layer_) return {layer_->forward(x), x};
    return rms_->fork(x);
  }
  at::Tensor weight() const { return layer_ ? layer_->weight : rms_ ? rms_->weight : at::Tensor(); }
  at::Tensor bias() const { return layer_ ? layer_->bias : at::Tensor(); }
  double epsilon() const { return epsilon_; }

 private:
  std::shared_ptr<nn::LayerNormImpl> layer_;
  std::shared_ptr<nn::RmsNormImpl> rms_;
  double epsilon_ = 0;
};

// A matrix, with a bias or none, and the norm before it, for nn::fused_linear().
nn::FusedLinear fused(const at::Tensor& weight, const at::Tensor& bias, const Norm& norm = {});

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
  // (1, N, C) of the tokens of `decoding`, and the rotation has their positions. With `documents`
  // the rotation has the positions of all tokens, row after row. What goes around is added, if
  // anything is given.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& rotation, Decoding* decoding = nullptr,
                     const nn::Documents* documents = nullptr, const at::Tensor& around = {});
  // The same by fused kernels, for few new tokens: x is not normed yet, and is added to the result.
  at::Tensor add_to(const at::Tensor& x, const Norm& norm, const at::Tensor& rotation,
                    Decoding& decoding);
  bool is_shared() const { return qkv_->sharing.has_value(); }

 private:
  at::Tensor attend_new(const at::Tensor& qkv, const at::Tensor& rotation,
                        Decoding& decoding) const;

  int64_t layer_, heads_, kv_heads_, window_;
  nn::Linear qkv_, out_{nullptr};
  Norm q_norm_, k_norm_;  // none without qk_norm
};
TORCH_MODULE(Attention);

class MlpImpl : public torch::nn::Module {
 public:
  MlpImpl(Parts& parts, const std::string& prefix);

  at::Tensor forward(const at::Tensor& x, const at::Tensor& around = {});  // likewise
  at::Tensor add_to(const at::Tensor& x, const Norm& norm);                // as AttentionImpl's

 private:
  bool gated_;
  nn::Linear up_, down_;  // up is gate and up where it is gated
};
TORCH_MODULE(Mlp);

class BlockImpl : public torch::nn::Module {
 public:
  // The MLP and its norm compute `tile` tokens of each row at once; 0: all.
  BlockImpl(Parts& parts, int64_t layer, int64_t tile = 0);

  at::Tensor forward(const at::Tensor& x, const at::Tensor& rotation, Decoding* decoding = nullptr,
                     const nn::Documents* documents = nullptr);

 private:
  Norm norm1_, norm2_;
  Attention attention_{nullptr};
  Mlp mlp_{nullptr};
  nn::Dropout dropout1_, dropout2_;
  int64_t tile_;
};
TORCH_MODULE(Block);

}  // namespace lockstep::model
