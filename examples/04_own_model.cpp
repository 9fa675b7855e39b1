// SPDX-License-Identifier: Apache-2.0
// A model of one's own from the first step to the last: weights that do not depend on the number of
// ranks, a learning rate that falls, clipping, and a checkpoint that a second run resumes from.
//
// $ lockstep run -n 2 build/bin/04_own_model 20
// [rank0]: begins at step 0
// [rank0]: step 20: it tells the spirals apart: no
//
// $ build/bin/04_own_model 600
// begins at step 20
// step 600: it tells the spirals apart: yes
#include <torch/nn/modules/linear.h>

#include <iostream>
#include <string>

#include "lockstep/lockstep.h"

struct SpiralsImpl : torch::nn::Module {
  torch::nn::Linear first{register_module("first", torch::nn::Linear(2, 64))};
  torch::nn::Linear second{register_module("second", torch::nn::Linear(64, 64))};
  torch::nn::Linear last{register_module("last", torch::nn::Linear(64, 1))};

  at::Tensor forward(const at::Tensor& x) {
    return last(torch::tanh(second(torch::tanh(first(x)))));
  }
};
TORCH_MODULE(Spirals);

// Points on two spirals that wind around each other, and which of the two each is on.
std::pair<at::Tensor, at::Tensor> points(int64_t count) {
  const at::Tensor side = torch::arange(count).remainder(2).to(torch::kFloat);
  const at::Tensor turn = torch::linspace(0.3, 1, count);
  const at::Tensor angle = turn * 9 + side * M_PI;
  return {torch::stack({turn * angle.cos(), turn * angle.sin()}, 1), side.unsqueeze(1)};
}

int main(int argc, char** argv) {
  using namespace lockstep;
  const comm::Group group = comm::init();
  const int64_t steps = argc > 1 ? std::stoll(argv[1]) : 600;
  Spirals model;
  nn::initialize(*model, /*seed=*/1);
  auto ddp = parallel::ddp(*model, group);
  optim::AdamW optimizer(*model);
  const optim::LrSchedule schedule(optim::ScheduleKind::cosine, {.lr = 1e-2, .total_steps = 600});

  int64_t step = 0;
  const auto state = checkpoint::state(*model, optimizer);
  if (const auto loaded = checkpoint::load_newest("spirals", state, group)) step = loaded->step;
  if (group.rank() == 0) std::cout << "begins at step " << step << "\n";

  const auto [x, y] = points(512);
  const int64_t share = 512 / group.size(), first = group.rank() * share;
  for (; step < steps; ++step) {
    const at::Tensor output = ddp.forward(x.narrow(0, first, share));
    torch::binary_cross_entropy_with_logits(output, y.narrow(0, first, share)).backward();
    optim::clip_grad_norm_(*model, 1.0);
    optimizer.set_lr(schedule.lr(step));
    optimizer.step();
    optimizer.zero_grad();
  }
  checkpoint::save("spirals", {.step = step, .slices = state}, group);
  const bool right = (model->forward(x).gt(0) == y.gt(0.5)).all().item<bool>();
  if (group.rank() == 0) {
    std::cout << "step " << step << ": it tells the spirals apart: " << (right ? "yes" : "no")
              << "\n";
  }
}
