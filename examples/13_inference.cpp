// SPDX-License-Identifier: Apache-2.0
// Inference of a network of one's own that is no language model: convolutions cut images into
// patches, attention relates them, a classifier rates ten classes. Ranks share it in any layout
// (dp tp pp), and with "offload" its weights rest in host memory. The outputs are those of the same
// network in one process. How far apart they are is on stderr.
//
// $ build/bin/13_inference
// dp 1 x tp 1 x pp 1: 8 images, outputs of one process
//
// $ lockstep run -n 4 build/bin/13_inference 1 2 2
// [rank0]: dp 1 x tp 2 x pp 2: 8 images, outputs of one process
//
// $ lockstep run -n 4 build/bin/13_inference 2 1 2 offload
// [rank0]: dp 2 x tp 1 x pp 2: 8 images, outputs of one process; weights came from the host
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/normalization.h>
#include <torch/utils.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "lockstep/lockstep.h"

using namespace lockstep;

constexpr int64_t kWidth = 64, kHeads = 4;

// (N, 3, 32, 32) images to (N, 64, kWidth) patches.
struct PatchesImpl : torch::nn::Module {
  torch::nn::Conv2d edges{
      register_module("edges", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 16, 3).padding(1)))};
  torch::nn::Conv2d cut{
      register_module("cut", torch::nn::Conv2d(torch::nn::Conv2dOptions(16, kWidth, 4).stride(4)))};
  at::Tensor place = register_parameter("place", torch::zeros({64, kWidth}));
  at::Tensor forward(const at::Tensor& x) {
    return cut(torch::relu(edges(x))).flatten(2).transpose(1, 2) + place;
  }
};
TORCH_MODULE(Patches);

torch::nn::LayerNorm norm() { return torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})); }

struct BlockImpl : torch::nn::Module {
  torch::nn::LayerNorm before_attention{register_module("before_attention", norm())};
  torch::nn::LayerNorm before_mlp{register_module("before_mlp", norm())};
  nn::Linear qkv{register_module("qkv", nn::Linear(kWidth, 3 * kWidth))};
  nn::Linear out{register_module("out", nn::Linear(kWidth, kWidth))};
  nn::Linear up{register_module("up", nn::Linear(kWidth, 4 * kWidth))};
  nn::Linear down{register_module("down", nn::Linear(4 * kWidth, kWidth))};

  at::Tensor forward(const at::Tensor& x) {
    // A tensor-parallel rank has some of the heads.
    const auto heads = [](const at::Tensor& t) {
      return t.unflatten(-1, {-1, kWidth / kHeads}).transpose(1, 2);
    };
    const auto parts = qkv(before_attention(x)).chunk(3, -1);
    const at::Tensor scores = heads(parts[0]).matmul(heads(parts[1]).transpose(2, 3)) / 4;
    const at::Tensor seen = scores.softmax(-1).matmul(heads(parts[2]));
    const at::Tensor h = x + out(seen.transpose(1, 2).flatten(2));
    return h + down(torch::gelu(up(before_mlp(h))));
  }
};
TORCH_MODULE(Block);

struct ClassesImpl : torch::nn::Module {
  torch::nn::LayerNorm before{register_module("before", norm())};
  nn::Linear rate{register_module("rate", nn::Linear(kWidth, 10))};
  at::Tensor forward(const at::Tensor& x) { return rate(before(x).mean(1)); }
};
TORCH_MODULE(Classes);

// Weights by name, the same in every layout. A checkpoint would give them, too.
bool weights(const at::Tensor& weight, const nn::init::Source& source) {
  nn::init::normal_(weight, source, {.mean = weight.dim() > 1 ? 0.0 : 0.5, .std = 0.1});
  return true;
}

// No rank plans memory for gradients and optimizer state.
template <class Module>
Module untrained() {
  Module module;
  for (at::Tensor& parameter : module->parameters()) parameter.set_requires_grad(false);
  return module;
}

parallel::Pipeline network(const layout::ParallelConfig& config, const comm::Group& group,
                           bool offload) {
  std::vector<parallel::Layer> layers{parallel::layer("patches", untrained<Patches>)};
  for (int i = 0; i < 4; ++i)
    layers.push_back(parallel::layer("blocks." + std::to_string(i), untrained<Block>));
  layers.push_back(parallel::layer("classes", untrained<Classes>));
  parallel::PipelineOptions others{
      .advanced = {.initializer = parallel::MaterializeOptions{.seed = 1, .rule = weights}}};
  if (offload) {
    others.data = parallel::FullyShardOptions{
        .use_orig_params = true,
        .offload =
            parallel::OffloadOptions{.device_limit = 200 << 10,
                                     .advanced = {.strategy = parallel::OffloadStrategy::extreme}}};
  }
  auto pipeline = parallel::parallelize(layers, config, group, others);
  pipeline.eval();
  return pipeline;
}

int main(int argc, char** argv) {
  const auto size = [&](int i) { return argc > i ? std::atoi(argv[i]) : 1; };
  const bool offload = argc > 4 && std::string(argv[4]) == "offload";
  const layout::ParallelConfig config{
      .dims = {.dp = size(1), .tp = size(2), .pp = size(3)},
      .schedule = parallel::PipelineSchedule::one_f_one_b,
      .tensor_plan = {{"blocks.*.qkv", parallel::TensorStyle::column, {kHeads, kHeads, kHeads}},
                      {"blocks.*.out", parallel::TensorStyle::row},
                      {"blocks.*.up", parallel::TensorStyle::column},
                      {"blocks.*.down", parallel::TensorStyle::row}}};
  const comm::Group world = comm::init();
  parallel::Pipeline model = network(config, world, offload);
  parallel::Pipeline alone = network({}, comm::Group(), false);

  torch::manual_seed(1);
  const at::Tensor images = torch::rand({8, 3, 32, 32});
  const int mine = 8 / config.dims.dp, first = mine * model.mesh().coordinate("dp");
  const auto image = [&](int i) { return parallel::Tensors{images.narrow(0, first + i, 1)}; };
  const auto expected = alone.forward(image, mine), found = model.forward(image, mine);
  double difference = 0;  // on the ranks of the last stage
  for (size_t i = 0; i < found.size(); ++i)
    difference = std::max(difference, (found[i][0] - expected[i][0]).abs().max().item<double>());
  const at::Tensor largest = torch::tensor(difference);
  comm::all_reduce(largest, world, {.op = comm::ReduceOp::max}).wait();
  int64_t from_host = 0;
  for (const auto& stage : model.sharded()) from_host += parallel::offload_stats(stage).to_device;
  const bool same = largest.item<double>() < 1e-6;
  if (world.rank() == 0) {
    std::fprintf(stderr, "largest difference %g\n", largest.item<double>());
    std::printf("%s: 8 images, %s%s\n", model.mesh().describe().c_str(),
                same ? "outputs of one process" : "other outputs than one process",
                from_host > 0 ? "; weights came from the host" : "");
  }
  return same ? 0 : 1;
}
