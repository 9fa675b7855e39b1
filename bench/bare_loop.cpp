// SPDX-License-Identifier: Apache-2.0
// A training loop as one writes it by hand: the model, its loss, an optimizer, random tokens, one
// process; what the trainer's step is compared with.
//
//   bench_bare_loop LAYERS HIDDEN HEADS FFN VOCAB ROWS LENGTH STEPS
// Llama, bfloat16 on CUDA where there is one, else float32 on the CPU. Prints one JSON line.
#include <ATen/ATen.h>

#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "lockstep/core/clock.h"
#include "lockstep/model/language_model.h"
#include "lockstep/nn/linear.h"
#include "lockstep/nn/loss.h"
#include "lockstep/optim/adamw.h"

int main(int argc, char** argv) {
  using namespace lockstep;
  if (argc != 9) {
    std::cerr << "usage: bench_bare_loop LAYERS HIDDEN HEADS FFN VOCAB ROWS LENGTH STEPS\n";
    return 2;
  }
  std::vector<int64_t> numbers;
  for (int i = 1; i < argc; ++i) numbers.push_back(std::stoll(argv[i]));
  const int64_t rows = numbers[5], length = numbers[6], steps = numbers[7];
  const config::ModelSpec spec{.kind = config::ModelKind::llama,
                               .layers = numbers[0],
                               .hidden = numbers[1],
                               .heads = numbers[2],
                               .kv_heads = numbers[2],
                               .ffn = numbers[3],
                               .vocab = numbers[4],
                               .positions = length,
                               .tied = false};
  const bool cuda = at::hasCUDA();
  const auto options = at::TensorOptions()
                           .device(cuda ? at::kCUDA : at::kCPU)
                           .dtype(cuda ? at::kBFloat16 : at::kFloat);
  model::LanguageModel model(spec, {.tensors = options});
  model::initialize(*model, 1);
  optim::AdamW optimizer(*model, {.lr = 1e-4});
  const auto tokens = at::randint(spec.vocab, {rows, length}, options.dtype(at::kLong));
  const auto targets = at::randint(spec.vocab, {rows * length}, options.dtype(at::kLong));

  nn::time_products(cuda);
  std::vector<double> seconds;
  double loss_value = 0;
  for (int64_t step = 0; step < steps; ++step) {
    const auto start = Clock::now();
    const at::Tensor logits = model->forward(tokens).flatten(0, 1);
    const at::Tensor loss = nn::cross_entropy(
        logits, targets,
        {.scale = 1.0 / static_cast<double>(rows * length), .overwrite_logits = true});
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    loss_value = loss.item<double>();  // waits for the device
    seconds.push_back(seconds_since(start));
  }
  const double best = *std::min_element(seconds.begin() + 1, seconds.end());
  std::sort(seconds.begin(), seconds.end());
  std::cout << nlohmann::json{{"program", "bare_loop"},
                              {"parameters", spec.parameters()},
                              {"loss", loss_value},
                              {"step_s", best},
                              {"median_s", seconds[seconds.size() / 2]},
                              {"tok_s", static_cast<double>(rows * length) / best}}
            << std::endl;
}
