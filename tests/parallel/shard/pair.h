// SPDX-License-Identifier: Apache-2.0
// A small model, plain and sharded, that began alike.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "tests/parallel/shard/plain_and_sharded.h"

namespace lockstep::test {

struct Net : torch::nn::Cloneable<Net> {
  torch::nn::Linear a = nullptr, b = nullptr, spare = nullptr;
  torch::nn::LayerNorm norm = nullptr;
  torch::nn::Embedding table = nullptr;
  at::Tensor scale, order;

  Net() { reset(); }
  void reset() override {
    a = register_module("a", torch::nn::Linear(6, 8));
    b = register_module("b", torch::nn::Linear(8, 6));
    spare = register_module("spare", torch::nn::Linear(4, 3));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})));
    table = register_module("table", torch::nn::Embedding(5, 6));
    scale = register_parameter("scale", at::ones({6}));
    fill(*this, 17);
    order = register_parameter("order", at::tensor({3, 0, 2}, at::kLong), false);
  }
  at::Tensor forward(const at::Tensor& x) { return norm(b(at::gelu(a(x)))) * scale; }
};

inline at::Tensor input_of(int step) { return numbers({4, 6}, static_cast<uint64_t>(100 + step)); }

inline void on_ranks(const std::function<void(const comm::Group&)>& body, int ranks = 2) {
  comm::run_threads(ranks, body, {.backend = "thread", .timeout = std::chrono::seconds(20)});
}

struct Pair {
  explicit Pair(const comm::Group& group, const Sharding& sharding = {"drop", shard_all(), true})
      : sharded(shard(*model, group, sharding)) {}

  // The same with both, and everything that can be seen of it.
  template <class Use>
  void step(const Use& use) {
    const at::Tensor expected = use(*plain), loss = use(*model);
    require_same(loss, expected, "loss");
    expected.backward();
    loss.backward();
    update();
    require_same_state(sharded, *plain);
  }

  // After a backward of both.
  void update() {
    require_same_gradients(sharded, *plain);
    plain_sgd.step();
    sgd.step();
    drop_gradients(plain->parameters());
    drop_gradients(sharded.parameters());
  }

  std::shared_ptr<Net> plain = std::make_shared<Net>(), model = std::make_shared<Net>();
  parallel::ShardedModel sharded;
  torch::optim::SGD plain_sgd = make_sgd(plain->parameters()), sgd = make_sgd(sharded.parameters());
};

}  // namespace lockstep::test
