// SPDX-License-Identifier: Apache-2.0
// A small language model as a pipeline. Each rank builds only its own layers, and micro-batches
// pass through the ranks as a schedule says. The output layer computes with the weight of the
// embedding, which is on the first rank. Without the launcher the same code is one process.
//
// $ lockstep run -n 2 build/bin/06_pipeline
// [rank0]: 2 ranks, this one trains 3 of 5 parameters, 2 micro-batches in flight at most; learned
//
// $ build/bin/06_pipeline
// 1 ranks, this one trains 5 of 5 parameters, 1 micro-batches in flight at most; learned
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <iostream>

#include "lockstep/lockstep.h"

constexpr int64_t kTokens = 64, kWidth = 32;

struct BlockImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x + torch::tanh(linear(x)); }

  torch::nn::Linear linear{register_module("linear", torch::nn::Linear(kWidth, kWidth))};
};
TORCH_MODULE(Block);

int main() {
  using namespace lockstep;
  const comm::Group group = comm::init();
  constexpr int kMicroBatches = 4;
  const auto embedding = [] { return torch::nn::Embedding(kTokens, kWidth); };
  const std::vector<parallel::Layer> layers{
      parallel::layer("embed", embedding), parallel::layer("hidden.0", [] { return Block(); }),
      parallel::layer("hidden.1", [] { return Block(); }),
      parallel::tied_layer("embed", embedding,
                           [](torch::nn::EmbeddingImpl& embed, const parallel::Tensors& in) {
                             return torch::linear(in[0], embed.weight);
                           })};
  parallel::Pipeline pipeline(
      layers, group,
      {.schedule = parallel::PipelineSchedule::zb_h1, .microbatches = kMicroBatches});
  optim::AdamW optimizer(pipeline.named_parameters(), {.lr = 1e-2});

  // Every rank draws the same data: the first needs the tokens, the last the targets.
  torch::manual_seed(1);
  double loss = 1;
  for (int step = 0; step < 300; ++step) {
    const at::Tensor tokens = torch::randint(kTokens, {kMicroBatches, 32}, at::kLong);
    const at::Tensor losses = pipeline.step(
        {.inputs = [&](int i) { return parallel::Tensors{tokens[i]}; },
         .loss =
             [&](int i, const parallel::Tensors& out) {
               const at::Tensor next = (tokens[i] + 1) % kTokens;
               return torch::nn::functional::cross_entropy(out[0], next) / kMicroBatches;
             }});
    pipeline.clip_grad_norm_(1);
    optimizer.step();
    optimizer.zero_grad();
    loss = losses.sum().item<double>();
  }
  if (group.rank() == 0) {
    std::cout << group.size() << " ranks, this one trains " << pipeline.parameters().size()
              << " of 5 parameters, " << pipeline.stats().peak_live
              << " micro-batches in flight at most; " << (loss < 0.1 ? "learned" : "not learned")
              << "\n";
  }
}
