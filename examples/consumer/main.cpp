// SPDX-License-Identifier: Apache-2.0
// A user's program: each rank computes a gradient from its own data, and all average them.
#include <torch/torch.h>

#include <iostream>

#include "lockstep/lockstep.h"

int main() {
  using namespace lockstep;
  try {
    const comm::Group group = comm::init();
    const torch::Tensor weight = torch::ones({2}, torch::requires_grad());
    const torch::Tensor data = torch::full({2}, 2.0 * (group.rank() + 1));
    (weight * data).sum().backward();  // the gradient is the data: 2 on rank 0, 4 on rank 1

    const torch::Tensor gradient = weight.grad();
    comm::all_reduce(gradient, group, {.op = comm::ReduceOp::avg}).wait();
    if (group.rank() == 0) {
      std::cout << "ranks " << group.size() << ", mean gradient " << gradient[0].item<double>()
                << std::endl;
    }
  } catch (const std::exception& failure) {
    std::cerr << "consumer: " << failure.what() << std::endl;
    return 1;
  }
}
