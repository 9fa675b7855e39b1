// SPDX-License-Identifier: Apache-2.0
// Times the backward of a stage of Llama blocks whole, and in the two halves of zero-bubble
// schedules, in turn.
//   OMP_NUM_THREADS=1 build/bin/bench_split_backward --layers 2
// One JSON line: medians in milliseconds of the forward F, of the whole backward B, of the
// gradients of inputs I and of weights W; what (I + W) / B is, in the median over pairs of
// neighbours; and the bytes that are kept between the halves, in addition to what forward saved.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/engine.h>

#include <CLI/CLI.hpp>
#include <iostream>
#include <nlohmann/json.hpp>

#include "bench/llama.h"
#include "lockstep/core/clock.h"
#include "lockstep/parallel/pipeline/split_backward.h"

using namespace lockstep;
using torch::autograd::impl::gradient_edge;

int main(int argc, char** argv) {
  bench::LlamaOptions sizes{.layers = 2, .width = 512, .heads = 8, .ffn = 1408, .vocabulary = 512};
  int64_t batch = 2, length = 256;
  int steps = 30, threads = 1;
  CLI::App app("Times a backward whole and in halves");
  app.add_option("--layers", sizes.layers);
  app.add_option("--width", sizes.width);
  app.add_option("--heads", sizes.heads);
  app.add_option("--ffn", sizes.ffn);
  app.add_option("--batch", batch);
  app.add_option("--seq", length);
  app.add_option("--steps", steps);
  app.add_option("--threads", threads);
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(threads);
  std::vector<bench::LlamaBlock> blocks;
  for (int64_t i = 0; i < sizes.layers; ++i) blocks.emplace_back(sizes);
  const at::Tensor gradient = at::randn({batch, length, sizes.width});
  std::vector<double> forward, whole, input, weight, ratio;
  size_t kept = 0;
  for (int step = -3; step < steps; ++step) {
    const auto run_forward = [&](const at::Tensor& in) {
      const auto start = Clock::now();
      at::Tensor x = in;
      for (auto& block : blocks) x = block(x);
      forward.push_back(1e3 * seconds_since(start));
      return gradient_edge(x);
    };
    const auto leaf = [&] { return at::randn(gradient.sizes()).requires_grad_(true); };
    const at::Tensor a = leaf(), b = leaf();
    auto root = run_forward(a);
    auto start = Clock::now();
    torch::autograd::Engine::get_default_engine().execute({root}, {gradient}, false, false, true,
                                                          {});
    whole.push_back(1e3 * seconds_since(start));
    root = run_forward(b);
    start = Clock::now();
    parallel::detail::SplitBackward split({std::move(root)}, {gradient}, {gradient_edge(b)});
    input.push_back(1e3 * seconds_since(start));
    kept = split.kept_bytes();
    start = Clock::now();
    split.run_weights();
    weight.push_back(1e3 * seconds_since(start));
    ratio.push_back((input.back() + weight.back()) / whole.back());
    if (step < 0)
      for (auto* samples : {&forward, &whole, &input, &weight, &ratio}) samples->clear();
  }
  const auto median = [](const std::vector<double>& samples) {
    return at::tensor(samples, at::kDouble).quantile(0.5).item<double>();
  };
  std::cout << nlohmann::ordered_json{{"layers", sizes.layers}, {"F_ms", median(forward)},
                                      {"B_ms", median(whole)},  {"I_ms", median(input)},
                                      {"W_ms", median(weight)}, {"halves_to_whole", median(ratio)},
                                      {"kept_bytes", kept}}
                   .dump()
            << "\n";
}
