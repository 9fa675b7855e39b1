// SPDX-License-Identifier: Apache-2.0
// Tensor parallelism of a network of one's own: ranks share its matrices by a plan of a few lines.
// The network is written once, for any number of ranks.
//
// $ lockstep run -n 2 build/bin/05_tensor
// [rank0]: 2 ranks, this one with 16898 of 33410 weights; learned
//
// $ lockstep run -n 4 build/bin/05_tensor
// [rank0]: 4 ranks, this one with 8642 of 33410 weights; learned
//
// $ build/bin/05_tensor
// 1 ranks, this one with 33410 of 33410 weights; learned
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <cstdio>

#include "lockstep/lockstep.h"

using namespace lockstep;

struct NetImpl : torch::nn::Module {
  nn::Linear in{register_module("in", nn::Linear(2, 64))};
  nn::Linear up{register_module("up", nn::Linear(64, 256))};
  nn::Linear down{register_module("down", nn::Linear(256, 64))};
  nn::Linear out{register_module("out", nn::Linear(64, 2))};

  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = torch::tanh(in(x));
    return out(h + down(torch::gelu(up(h))));
  }
};
TORCH_MODULE(Net);

// Outputs of `up` are shared out, and are the inputs of `down`: one sum over ranks for both. `in`
// and `out` are small, and whole on every rank.
const parallel::TensorPlan kPlan{{"up", parallel::TensorStyle::column},
                                 {"down", parallel::TensorStyle::row}};

int64_t count(const Net& net) {
  int64_t weights = 0;
  for (const at::Tensor& parameter : net->parameters()) weights += parameter.numel();
  return weights;
}

int main() {
  const comm::Group group = comm::init();
  Net net;
  nn::initialize(*net, /*seed=*/1);
  const int64_t all = count(net);
  const auto shared = parallel::tensor_parallel(*net, group, kPlan);
  optim::AdamW optimizer(*net, {.lr = 3e-3});

  torch::manual_seed(1);  // ranks that share a network see the same data
  double loss = 0;
  for (int step = 0; step < 300; ++step) {
    const at::Tensor x = torch::rand({64, 2}) * 2 - 1;
    const at::Tensor y = torch::stack({x.prod(1), (3 * x).sin().sum(1)}, 1);
    const at::Tensor error = torch::mse_loss(net(x), y);
    error.backward();
    shared.clip_grad_norm_(1);
    optimizer.step();
    optimizer.zero_grad();
    loss = error.item<double>();
  }
  if (group.rank() == 0)
    std::printf("%d ranks, this one with %ld of %ld weights; %s\n", group.size(),
                static_cast<long>(count(net)), static_cast<long>(all),
                loss < 0.02 ? "learned" : "not learned");
}
