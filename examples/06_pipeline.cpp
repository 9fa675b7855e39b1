// SPDX-License-Identifier: Apache-2.0
// A network of one's own as a pipeline: each rank builds its layers only, and micro-batches pass
// through the ranks as a schedule says. Without the launcher the same code is one process.
//
// $ lockstep run -n 2 build/bin/06_pipeline
// [rank0]: 2 ranks, this one with 2 of 4 layers and 2 micro-batches in flight at most; learned
//
// $ build/bin/06_pipeline
// 1 ranks, this one with 4 of 4 layers and 1 micro-batches in flight at most; learned
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <iostream>

#include "lockstep/lockstep.h"

struct BlockImpl : torch::nn::Module {
  BlockImpl(int64_t in, int64_t out)
      : linear(register_module("linear", torch::nn::Linear(in, out))) {}
  at::Tensor forward(const at::Tensor& x) { return torch::tanh(linear(x)); }

  torch::nn::Linear linear;
};
TORCH_MODULE(Block);

int main() {
  using namespace lockstep;
  const comm::Group group = comm::init();
  constexpr int kMicroBatches = 4;
  const std::vector<parallel::Layer> layers{
      parallel::layer("in", [] { return Block(2, 32); }),
      parallel::layer("hidden.0", [] { return Block(32, 32); }),
      parallel::layer("hidden.1", [] { return Block(32, 32); }),
      parallel::layer("out", [] { return torch::nn::Linear(32, 1); })};
  parallel::Pipeline pipeline(
      layers, group,
      {.schedule = parallel::PipelineSchedule::zb_h1, .microbatches = kMicroBatches});
  optim::AdamW optimizer(pipeline.named_parameters(), {.lr = 5e-3});

  torch::manual_seed(1);  // every rank draws the same data: the first needs x, the last the product
  double loss = 1;
  for (int step = 0; step < 300; ++step) {
    const at::Tensor x = torch::rand({kMicroBatches, 32, 2});
    const at::Tensor losses = pipeline.step(
        {.inputs = [&](int i) { return parallel::Tensors{x[i]}; },
         .loss =
             [&](int i, const parallel::Tensors& out) {
               return torch::mse_loss(out[0], x[i].prod(1, /*keepdim=*/true)) / kMicroBatches;
             }});
    pipeline.clip_grad_norm_(1);
    optimizer.step();
    optimizer.zero_grad();
    loss = losses.sum().item<double>();
  }
  if (group.rank() == 0) {
    std::cout << group.size() << " ranks, this one with " << pipeline.parameters().size() / 2
              << " of 4 layers and " << pipeline.stats().peak_live
              << " micro-batches in flight at most; " << (loss < 1e-3 ? "learned" : "not learned")
              << "\n";
  }
}
