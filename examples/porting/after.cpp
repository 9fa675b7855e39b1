// SPDX-License-Identifier: Apache-2.0
// before.cpp on any number of ranks, after the five steps of docs/porting.md. The losses are the
// same on one rank and on two: lockstep run -n 2 build/bin/porting_after
#include <torch/torch.h>

#include <cstdio>

#include "lockstep/lockstep.h"

struct Points : torch::data::datasets::Dataset<Points> {
  explicit Points(int64_t count) : x(torch::rand({count, 8})), y(x.norm(2, 1, true)) {}
  torch::data::Example<> get(size_t index) override {
    const auto row = static_cast<int64_t>(index);
    return {x[row], y[row]};
  }
  torch::optional<size_t> size() const override { return x.size(0); }

  torch::Tensor x, y;  // points, and how far they are from the origin
};

int main() {
  const lockstep::comm::Group group = lockstep::comm::init();
  torch::manual_seed(0);
  const Points train(1024), test(250);
  torch::nn::Sequential model(torch::nn::Linear(8, 128), torch::nn::GELU(),
                              torch::nn::Linear(128, 128), torch::nn::GELU(),
                              torch::nn::Linear(128, 1));
  auto sharded = lockstep::parallel::fully_shard(*model, group);

  auto examples = Points(train).map(torch::data::transforms::Stack<>());
  lockstep::data::DistributedSampler sampler(1024, group, {.seed = 7});
  auto loader = torch::data::make_data_loader(std::move(examples), sampler, 64 / group.size());

  torch::optim::AdamW optimizer(sharded.parameters(), 1e-3);
  const auto state = lockstep::checkpoint::state(sharded, optimizer);
  const auto saved = lockstep::checkpoint::load_newest("checkpoints", state, group);
  const int64_t first = saved ? saved->step : 0;
  sampler.set_epoch(first);

  for (int64_t epoch = first; epoch < first + 3; ++epoch) {
    double sum = 0;
    for (auto& batch : *loader) {
      const torch::Tensor loss = torch::mse_loss(model->forward(batch.data), batch.target);
      optimizer.zero_grad();
      loss.backward();
      sharded.clip_grad_norm_(0.5);
      optimizer.step();
      sum += loss.item<double>();
    }
    lockstep::checkpoint::save("checkpoints", {.step = epoch + 1, .slices = state}, group);

    const torch::NoGradGuard no_grad;
    const torch::Tensor x = test.x.tensor_split(group.size())[group.rank()];
    const torch::Tensor y = test.y.tensor_split(group.size())[group.rank()];
    double error = (model->forward(x) - y).square().sum().item<double>();
    const torch::Tensor sums = torch::tensor({sum / group.size(), error / 250}, torch::kDouble);
    lockstep::comm::all_reduce(sums, group).wait();
    sum = sums[0].item<double>();
    error = sums[1].item<double>();
    if (group.rank() > 0) continue;
    std::printf("epoch %d: loss %.6f, test %.6f\n", int(epoch), sum / 16, error);
  }
}
