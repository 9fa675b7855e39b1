// SPDX-License-Identifier: Apache-2.0
// What recomputation costs and saves, for a transformer of torch's modules as a user would write
// it: nothing, all but products, and whole blocks computed again, in turn.
//
//   bench_recompute [LAYERS WIDTH HEADS ROWS LENGTH ROUNDS]
#include <ATen/ATen.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "lockstep/lockstep.h"
#include "lockstep/memory/meter.h"

using namespace lockstep;
using layout::Recompute;

struct BlockImpl : torch::nn::Module {
  BlockImpl(int64_t width, int64_t heads)
      : heads(heads),
        norm1(register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        norm2(register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        qkv(register_module("qkv", torch::nn::Linear(width, 3 * width))),
        out(register_module("out", torch::nn::Linear(width, width))),
        up(register_module("up", torch::nn::Linear(width, 4 * width))),
        down(register_module("down", torch::nn::Linear(4 * width, width))) {}

  at::Tensor forward(const at::Tensor& x) {
    const int64_t rows = x.size(0), length = x.size(1), width = x.size(2);
    const auto split = [&](const at::Tensor& all) {
      return all.view({rows, length, heads, width / heads}).transpose(1, 2);
    };
    const auto parts = qkv(norm1(x)).chunk(3, -1);
    const at::Tensor scores = at::matmul(split(parts[0]), split(parts[1]).transpose(2, 3));
    const at::Tensor mixed =
        at::matmul(at::softmax(scores / std::sqrt(width / heads), -1), split(parts[2]));
    const at::Tensor y = x + drop(out(mixed.transpose(1, 2).reshape({rows, length, width})));
    return y + drop(down(at::gelu(up(norm2(y)))));
  }

  int64_t heads;
  torch::nn::LayerNorm norm1, norm2;
  torch::nn::Linear qkv, out, up, down;
  torch::nn::Dropout drop{register_module("drop", torch::nn::Dropout(0.1))};
};
TORCH_MODULE(Block);

struct Result {
  double best_ms = 1e9;
  int64_t kept = 0;  // bytes between forward and backward
  std::vector<at::Tensor> gradients;
};

int main(int argc, char** argv) {
  const auto number = [&](int i, int64_t otherwise) {
    return argc > i ? std::atoll(argv[i]) : otherwise;
  };
  const int64_t layers = number(1, 4), width = number(2, 256), heads = number(3, 4);
  const int64_t rows = number(4, 8), length = number(5, 128), rounds = number(6, 10);
  memory::Meter::install();
  std::vector<parallel::Layer> blocks;
  for (int64_t i = 0; i < layers; ++i)
    blocks.push_back(parallel::layer(std::to_string(i), [=] { return Block(width, heads); }));
  const at::Tensor input = at::randn({rows, length, width});

  const auto step = [&](Recompute recompute, Result& result) {
    torch::manual_seed(1);
    torch::nn::Module model;
    const auto forward = parallel::build_layers(blocks, model, recompute);
    const auto begin = std::chrono::steady_clock::now();
    const int64_t before = memory::Meter::current();
    parallel::Tensors x{input};
    for (const auto& layer : forward) x = layer(x);
    const at::Tensor loss = x[0].square().mean();
    x.clear();
    result.kept = memory::Meter::current() - before;
    loss.backward();
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
    result.best_ms = std::min(result.best_ms, took.count());
    result.gradients.clear();
    for (const at::Tensor& parameter : model.parameters())
      result.gradients.push_back(parameter.grad());
  };
  Result none, selective, full;
  for (int64_t round = 0; round < rounds; ++round) {
    step(Recompute::none, none);
    step(Recompute::selective, selective);
    step(Recompute::full, full);
  }
  bool same = true;
  for (size_t i = 0; i < none.gradients.size(); ++i) {
    same = same && at::equal(none.gradients[i], selective.gradients[i]) &&
           at::equal(none.gradients[i], full.gradients[i]);
  }
  std::printf("%-10s %9s %7s %10s %7s\n", "recompute", "best ms", "", "kept MB", "");
  const auto print = [&](const char* name, const Result& result) {
    std::printf("%-10s %9.1f %6.3fx %10.1f %6.3fx\n", name, result.best_ms,
                result.best_ms / none.best_ms, static_cast<double>(result.kept) / 1e6,
                static_cast<double>(result.kept) / static_cast<double>(none.kept));
  };
  print("none", none);
  print("selective", selective);
  print("full", full);
  std::printf("gradients: %s\n", same ? "the same bits" : "DIFFERENT BITS");
  return same ? 0 : 1;
}
