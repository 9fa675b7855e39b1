// SPDX-License-Identifier: Apache-2.0
// A network of one's own, which knows nothing of Lockstep, with its parameters, gradients and
// optimizer state shared out over the ranks. It is built without memory first, so that no rank ever
// has all of it. Without the launcher the same code is one process.
//
// $ lockstep run -n 2 build/bin/03_fully_shard
// [rank0]: 2 ranks: this one has 50 % of 1055233 parameters; it has learned to measure lengths
//
// $ build/bin/03_fully_shard
// 1 ranks: this one has 100 % of 1055233 parameters; it has learned to measure lengths
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/optim/adamw.h>
#include <torch/utils.h>

#include <cmath>
#include <iostream>

#include "lockstep/lockstep.h"

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width)
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        up(register_module("up", torch::nn::Linear(width, 4 * width))),
        down(register_module("down", torch::nn::Linear(4 * width, width))) {}
  at::Tensor forward(const at::Tensor& x) { return x + down(torch::gelu(up(norm(x)))); }

  torch::nn::LayerNorm norm;
  torch::nn::Linear up, down;
};
TORCH_MODULE(Block);

int main() {
  using namespace lockstep;
  const comm::Group group = comm::init();
  auto deferred = parallel::deferred([] {
    return torch::nn::Sequential(torch::nn::Linear(8, 256), Block(256), Block(256),
                                 torch::nn::LayerNorm(torch::nn::LayerNormOptions({256})),
                                 torch::nn::Linear(256, 1));
  });
  auto sharded = parallel::fully_shard(deferred, group, {.units = parallel::ByType{{"Block"}}});
  torch::nn::Sequential model = deferred.model;
  torch::optim::AdamW optimizer(sharded.parameters(), torch::optim::AdamWOptions(1e-4));

  torch::manual_seed(group.rank());  // each rank draws its own data
  double loss_value = 1;
  for (int step = 0; step < 120; ++step) {
    const at::Tensor x = torch::rand({64, 8});
    const at::Tensor length = x.norm(2, /*dim=*/1, /*keepdim=*/true);
    const at::Tensor loss = torch::mse_loss(model->forward(x), length);
    loss.backward();  // parameters come and go, gradients end in the shards
    sharded.clip_grad_norm_(1.0);
    optimizer.step();
    optimizer.zero_grad();
    loss_value = loss.item<double>();
  }
  if (group.rank() == 0) {
    const bool learned = loss_value < 2e-2;  // a constant answer has at least 6.6e-2
    const auto stats = sharded.stats();
    std::cout << group.size() << " ranks: this one has " << std::lround(100 * stats.local_ratio)
              << " % of " << stats.num_parameters << " parameters; it has "
              << (learned ? "learned" : "not learned") << " to measure lengths\n";
  }
}
