// SPDX-License-Identifier: Apache-2.0
// Data, tensor and pipeline parallelism of one network at once. Eight ranks are a cube: two stages,
// whose matrices two ranks share, whose parts two ranks that have data of their own share in turn.
// The curve is that of one process. One call applies a configuration to the layers; see
// parallel/pipeline/stage.cpp for the order.
//
// $ lockstep run -n 8 build/bin/07_three_d 2 2 2
// [rank0]: dp 2 x tp 2 x pp 2: this rank updates 12800 of 99650 weights; learned
//
// $ build/bin/07_three_d
// dp 1 x tp 1 x pp 1: this rank updates 99650 of 99650 weights; learned
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "lockstep/lockstep.h"

using namespace lockstep;

struct BlockImpl : torch::nn::Module {
  nn::Linear up{register_module("up", nn::Linear(64, 192))};
  nn::Linear down{register_module("down", nn::Linear(192, 64))};
  at::Tensor forward(const at::Tensor& x) { return x + down(torch::gelu(up(x))); }
};
TORCH_MODULE(Block);

// Initial values by name, the same on any number of ranks.
bool initial(const at::Tensor& weight, const nn::init::Source& source) {
  nn::init::normal_(weight, source, {.std = weight.dim() > 1 ? 0.1 : 0});
  return true;
}

std::vector<parallel::Layer> network() {
  std::vector<parallel::Layer> layers{parallel::layer("in", [] { return nn::Linear(2, 64); })};
  for (int i = 0; i < 4; ++i)
    layers.push_back(parallel::layer("blocks." + std::to_string(i), [] { return Block(); }));
  layers.push_back(parallel::layer("out", [] { return nn::Linear(64, 2); }));
  return layers;
}

int main(int argc, char** argv) {
  const auto size = [&](int i) { return argc > i ? std::atoi(argv[i]) : 1; };
  constexpr int kRows = 8;  // of a step; each is a micro-batch
  const layout::ParallelConfig config{
      .dims = {.dp = size(1), .tp = size(2), .pp = size(3)},
      .global_batch_size = kRows,
      .sharding = parallel::ShardingStrategy::full_shard,
      .schedule = parallel::PipelineSchedule::one_f_one_b,
      .tensor_plan = {{"blocks.*.up", parallel::TensorStyle::column},
                      {"blocks.*.down", parallel::TensorStyle::row}}};
  parallel::Pipeline model = parallel::parallelize(
      network(), config, comm::init(),
      {.advanced = {.initializer = parallel::MaterializeOptions{.seed = 1, .rule = initial}}});
  const mesh::Mesh& mesh = model.mesh();
  const int mine = config.microbatches(), first = mine * mesh.coordinate("dp");
  optim::AdamW optimizer(model.named_parameters(), {.lr = 3e-3});

  torch::manual_seed(1);
  at::Tensor loss;
  for (int step = 0; step < 140; ++step) {
    const at::Tensor x = torch::rand({kRows, 16, 2}) * 2 - 1;
    const at::Tensor y = torch::stack({x.prod(2), (3 * x).sin().sum(2)}, 2);
    loss = model
               .step({.inputs = [&](int i) { return parallel::Tensors{x[first + i]}; },
                      .loss =
                          [&](int i, const parallel::Tensors& out) {
                            return torch::mse_loss(out[0], y[first + i]) / mine;
                          }})
               .sum();
    model.clip_grad_norm_(1);
    optimizer.step();
    optimizer.zero_grad();
  }
  comm::all_reduce(loss, mesh["dp"], {.op = comm::ReduceOp::avg}).wait();
  int64_t weights = 0;
  for (const at::Tensor& parameter : model.parameters()) weights += parameter.numel();
  const int64_t all = (2 * 64 + 64) + 4 * (2 * 64 * 192 + 192 + 64) + (64 * 2 + 2);
  if (mesh.rank() == 0)
    std::printf("%s: this rank updates %ld of %ld weights; %s\n", mesh.describe().c_str(),
                static_cast<long>(weights), static_cast<long>(all),
                loss.item<double>() < 0.02 ? "learned" : "not learned");
}
