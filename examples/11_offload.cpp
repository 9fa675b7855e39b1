// SPDX-License-Identifier: Apache-2.0
// Training with a device that holds a quarter of what is trained: parameters, gradients and AdamW's
// moments rest in host memory and come to the device when they are used. Without a GPU the device
// is a part of the machine's memory, kept apart. The numbers of a run are on stderr.
//
// $ build/bin/11_offload
// 16 tensors, 8396800 elements (mean 524800, median 524800, min 1024, max 1048576), 32 MB
// 1 ranks: 128 MB of state in all, the device kept its limit of 32 MB, the loss has halved
//
// $ lockstep run -n 2 build/bin/11_offload
// [rank0]: 16 tensors, 8396800 elements (mean 524800, median 524800, min 1024, max 1048576), 32 MB
// [rank0]: 2 ranks: 128 MB of state in all, the device kept its limit of 32 MB, the loss has halved
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <iostream>

#include "lockstep/lockstep.h"

int main() {
  using namespace lockstep;
  constexpr int64_t kMegabyte = 1 << 20;
  const comm::Group group = comm::init();
  torch::manual_seed(1);
  torch::nn::Sequential model;
  for (int i = 0; i < 8; ++i) {
    if (i > 0) model->push_back(torch::nn::Tanh());
    model->push_back(torch::nn::Linear(1024, 1024));
  }
  const parallel::OffloadOptions offload{
      .device_limit = 32 * kMegabyte, .advanced = {.strategy = parallel::OffloadStrategy::extreme}};
  if (group.rank() == 0) {
    std::cout << optim::model_parameters(*model).describe() << "\n";
    std::clog << offload.describe() << "\n";
  }
  auto sharded = parallel::fully_shard(*model, group,
                                       {.units = parallel::ByType{{"Linear"}}, .offload = offload});
  parallel::OffloadedAdamW optimizer(sharded, {.lr = 1e-3});

  torch::manual_seed(group.rank());  // each rank has its own data
  const at::Tensor x = torch::randn({64, 1024});
  double first = 0, last = 0;
  for (int step = 0; step < 20; ++step) {
    const at::Tensor loss = torch::mse_loss(model->forward(x), x.relu());
    loss.backward();  // layer by layer, parameters come and gradients go
    sharded.clip_grad_norm_(1.0);
    optimizer.step();  // returns at once: the next use of a parameter waits for its update
    optimizer.zero_grad();
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  optimizer.wait();
  if (group.rank() == 0) {
    const parallel::OffloadStats stats = parallel::offload_stats(sharded);
    std::clog << "loss " << first << " to " << last << "; at most " << stats.device_peak / kMegabyte
              << " MB on the device, " << stats.host_peak / kMegabyte << " MB on the host\n";
    std::cout << group.size() << " ranks: " << 4 * sharded.stats().num_parameters * 4 / kMegabyte
              << " MB of state in all, the device "
              << (stats.device_peak <= stats.device_limit ? "kept" : "broke") << " its limit of "
              << stats.device_limit / kMegabyte << " MB, the loss has "
              << (last < first / 2 ? "halved" : "not halved") << "\n";
  }
}
