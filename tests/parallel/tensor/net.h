// SPDX-License-Identifier: Apache-2.0
// A model that tensor-parallel ranks share, for tests.
#pragma once

#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <memory>

#include "lockstep/nn/dropout.h"
#include "lockstep/nn/embedding.h"
#include "lockstep/nn/init_model.h"
#include "lockstep/nn/linear.h"
#include "lockstep/nn/norm.h"
#include "lockstep/parallel/tensor/tensor.h"

namespace lockstep::test {

struct NetImpl : torch::nn::Module {
  explicit NetImpl(int64_t vocab = 11) {
    embed = register_module("embed", nn::Embedding(vocab, 8));
    positions = register_module("positions", nn::Embedding(6, 8));
    norm = register_module("norm", nn::LayerNorm(8));
    up = register_module("up", nn::Linear(8, 24));
    down = register_module("down", nn::Linear(12, 8));
    dropout = register_module("dropout", nn::Dropout(0.25));
    head = register_module("head", nn::Linear(8, vocab));
    nn::attach_random(*this, random);
  }

  // A gated MLP between embeddings and a head.
  at::Tensor mlp(const at::Tensor& x) {
    const auto halves = up(x).chunk(2, -1);
    return down(halves[0] * halves[1].sigmoid());
  }
  at::Tensor forward(const at::Tensor& tokens) {
    const at::Tensor x = embed(tokens) + positions->first(tokens.size(1));
    return head(x + dropout(mlp(norm(x))));
  }

  std::shared_ptr<nn::RandomContext> random = std::make_shared<nn::RandomContext>();
  nn::Embedding embed{nullptr}, positions{nullptr};
  nn::LayerNorm norm{nullptr};
  nn::Linear up{nullptr}, down{nullptr}, head{nullptr};
  nn::Dropout dropout{nullptr};
};
TORCH_MODULE(Net);

inline layout::TensorPlan plan() {
  return {{"embed", layout::TensorStyle::vocab},   {"positions", layout::TensorStyle::sequence},
          {"norm", layout::TensorStyle::sequence}, {"up", layout::TensorStyle::column, {12, 12}},
          {"down", layout::TensorStyle::row},      {"dropout", layout::TensorStyle::sequence},
          {"head", layout::TensorStyle::vocab}};
}

inline Net made(int64_t vocab = 11) {
  Net net(vocab);
  nn::initialize(*net, 7);
  return net;
}

inline at::Tensor tokens(int64_t rows, int64_t vocab) {
  return at::arange(rows * 4, at::kLong).view({rows, 4}).mul(5).remainder(vocab);
}

// Every parameter's gradient is this rank's part of that of the whole model.
inline void expect_gradients(const torch::nn::Module& model, const parallel::TensorParallel& shared,
                             const torch::nn::Module& whole) {
  const auto part = [](at::Tensor tensor, const layout::Box& box) {
    for (size_t d = 0; d < box.ranges.size(); ++d)
      tensor = tensor.narrow(static_cast<int64_t>(d), box.ranges[d].begin, box.ranges[d].size());
    return tensor;
  };
  for (const auto& item : model.named_parameters()) {
    const at::Tensor gradient = item.value().grad();
    const at::Tensor other = whole.named_parameters()[item.key()].grad();
    const auto split = shared.split(item.key(), item.value().sizes().vec());
    ASSERT_EQ(split.local_shape(), item.value().sizes().vec());
    for (const auto& [local, global] : split.pieces(layout::Box::whole(split.local_shape()))) {
      EXPECT_TRUE(at::allclose(part(gradient, local), part(other, global), 1e-4, 1e-6))
          << item.key() << " on rank " << shared.group().rank();
    }
  }
}

}  // namespace lockstep::test
