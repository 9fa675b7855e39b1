// SPDX-License-Identifier: Apache-2.0
// Trains one network on the data of all ranks: every rank computes gradients of its own examples,
// backward() leaves the average on all of them. Without the launcher the same code is one process.
//
// $ lockstep run -n 2 build/bin/02_ddp
// [rank0]: 2 ranks, 512 examples a step: the network has learned to multiply
//
// $ build/bin/02_ddp
// 1 ranks, 256 examples a step: the network has learned to multiply
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <iostream>

#include "lockstep/lockstep.h"

int main() {
  using namespace lockstep;
  const comm::Group group = comm::init();
  torch::manual_seed(group.rank());  // each rank draws its own data; all train rank 0's weights
  torch::nn::Sequential model(torch::nn::Linear(2, 32), torch::nn::Tanh(),
                              torch::nn::Linear(32, 1));
  auto ddp = parallel::ddp(*model, group);
  optim::AdamW optimizer(*model, {.lr = 1e-2});
  double loss_value = 1;
  for (int step = 0; step < 400; ++step) {
    const at::Tensor x = torch::rand({256, 2});
    const at::Tensor loss = torch::mse_loss(ddp.forward(x), x.prod(1, /*keepdim=*/true));
    loss.backward();  // gradients are averaged while it runs
    optimizer.step();
    optimizer.zero_grad();
    loss_value = loss.item<double>();
  }
  if (group.rank() == 0) {
    std::cout << group.size() << " ranks, " << 256 * group.size()
              << " examples a step: the network has "
              << (loss_value < 1e-3 ? "learned" : "not learned") << " to multiply\n";
  }
}
