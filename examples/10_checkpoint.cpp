// SPDX-License-Identifier: Apache-2.0
// A sharded model of one's own and torch's AdamW, saved concurrently with training, and resumed by
// another number of ranks. Each run makes 100 steps more. The folder is plain safetensors files and
// a manifest: `lockstep checkpoint inspect checkpoints` looks into it.
//
// $ lockstep run -n 2 build/bin/10_checkpoint
// [rank0]: 2 ranks: steps 0 to 100, saved checkpoints/step-00000100
//
// $ lockstep run -n 3 build/bin/10_checkpoint
// [rank0]: 3 ranks: steps 100 to 200, saved checkpoints/step-00000200
//
// $ build/bin/10_checkpoint
// 1 ranks: steps 200 to 300, saved checkpoints/step-00000300
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/utils.h>

#include <iostream>

#include "lockstep/lockstep.h"

int main() {
  using namespace lockstep;
  const comm::Group group = comm::init();
  torch::nn::Sequential model(torch::nn::Linear(8, 256), torch::nn::GELU(),
                              torch::nn::Linear(256, 256), torch::nn::GELU(),
                              torch::nn::Linear(256, 1));
  auto sharded = parallel::fully_shard(*model, group);
  torch::optim::AdamW optimizer(sharded.parameters(), torch::optim::AdamWOptions(1e-3));

  const auto state = checkpoint::state(sharded, optimizer);
  int64_t step = 0;
  if (const auto path = checkpoint::newest("checkpoints", group))
    step = checkpoint::load(*path, state, group).step;

  checkpoint::Saver saver("checkpoints", group);
  const int64_t first = step, last = step + 100;
  torch::manual_seed(1000 * step + group.rank());  // each rank draws its own data
  while (step < last) {
    const at::Tensor x = torch::rand({64, 8});
    const at::Tensor loss = torch::mse_loss(model->forward(x), x.amax(1, /*keepdim=*/true));
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    if (++step % 50 == 0) saver.save({.step = step, .slices = state, .keep = 2});
  }
  saver.wait();
  if (group.rank() == 0) {
    std::cout << group.size() << " ranks: steps " << first << " to " << step << ", saved "
              << saver.take_finished().back().path << "\n";
  }
}
