// SPDX-License-Identifier: Apache-2.0
// Times forward and backward of transformer blocks that the ranks share, against the same blocks on
// one rank alone, in turn.
//   OMP_NUM_THREADS=1 lockstep run -n 2 build/bin/bench_tensor
// One JSON line: medians in milliseconds of a rank alone (the others wait), of all ranks with
// tensor parallelism, with sequence parallelism as well, and the speed-ups, in the median over
// neighbours. bench/torch_tensor.py is the peer.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <CLI/CLI.hpp>
#include <iostream>
#include <nlohmann/json.hpp>

#include "lockstep/comm/collectives.h"
#include "lockstep/config/tensor_parallel.h"
#include "lockstep/core/clock.h"
#include "lockstep/model/block.h"
#include "lockstep/model/language_model.h"
#include "lockstep/nn/attention_heads.h"
#include "lockstep/parallel/tensor/tensor.h"

using namespace lockstep;

namespace {

struct BlocksImpl : torch::nn::Module {
  BlocksImpl(const config::ModelSpec& spec, int64_t length) {
    model::Parts parts(spec, {});
    for (int64_t i = 0; i < spec.layers; ++i) {
      blocks.push_back(register_module("blocks" + std::to_string(i), model::Block(parts, i)));
    }
    const std::vector<double> frequencies(static_cast<size_t>(spec.head_size() / 2), 0.1);
    rotation = nn::rotary_table(frequencies, length);
    for (const auto& item : named_parameters()) {
      if (item.value().dim() > 1) nn::init::normal_(item.value(), {1, item.key()}, {.std = 0.02});
    }
  }

  at::Tensor forward(at::Tensor x) {
    for (auto& block : blocks) x = block(x, rotation);
    return x;
  }

  std::vector<model::Block> blocks;
  at::Tensor rotation;
};
TORCH_MODULE(Blocks);

// The reference models' plan, for blocks by themselves.
layout::TensorPlan plan_of(const config::ModelSpec& spec) {
  layout::TensorPlan plan;
  for (layout::TensorRule rule : config::tensor_plan(spec)) {
    if (!rule.pattern.starts_with("blocks.")) continue;
    rule.pattern.erase(std::string("blocks").size(), 1);  // blocks*.mlp.down
    plan.push_back(rule);
  }
  return plan;
}

double time_of(Blocks& blocks, const at::Tensor& input) {
  const auto start = Clock::now();
  const at::Tensor output = blocks(input.detach().requires_grad_());
  output.backward(at::ones_like(output));
  blocks->zero_grad(/*set_to_none=*/true);
  return 1e3 * seconds_since(start);
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<long>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  config::ModelSpec spec{
      .kind = config::ModelKind::llama, .layers = 2, .hidden = 1024, .heads = 16};
  int64_t batch = 1, length = 512;
  int steps = 15, threads = 1;
  CLI::App app("Times blocks that ranks share");
  app.add_option("--layers", spec.layers);
  app.add_option("--width", spec.hidden);
  app.add_option("--heads", spec.heads);
  app.add_option("--ffn", spec.ffn);
  app.add_option("--batch", batch);
  app.add_option("--seq", length);
  app.add_option("--steps", steps);
  app.add_option("--threads", threads);
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(threads);
  const comm::Group world = comm::init();
  spec = spec.resolved(length, 256);
  Blocks whole(spec, length), shared(spec, length), parts(spec, length);
  parallel::tensor_parallel(*shared, world, plan_of(spec));
  parallel::tensor_parallel(*parts, world, plan_of(spec), {.sequence_parallel = true});
  const at::Tensor input = at::randn({batch, length, spec.hidden});
  const int64_t share = length / world.size();
  const at::Tensor part = input.narrow(1, share * world.rank(), share).contiguous();

  std::vector<double> alone, tensor, sequence, gain, sequence_gain;
  const auto slowest = [&](double mine) {
    const at::Tensor time = at::full({1}, mine, at::kDouble);
    comm::all_reduce(time, world, {.op = comm::ReduceOp::max}).wait();
    return time.item<double>();
  };
  for (int step = -2; step < steps; ++step) {
    comm::barrier(world).wait();
    const double one = slowest(world.rank() == 0 ? time_of(whole, input) : 0);
    comm::barrier(world).wait();
    const double all = slowest(time_of(shared, input));
    comm::barrier(world).wait();
    const double with_sequence = slowest(time_of(parts, part));
    if (step < 0) continue;
    alone.push_back(one);
    tensor.push_back(all);
    sequence.push_back(with_sequence);
    gain.push_back(one / all);
    sequence_gain.push_back(one / with_sequence);
  }
  if (world.rank() != 0) return 0;
  const nlohmann::ordered_json report{
      {"ranks", world.size()},          {"threads", threads},
      {"backend", world.backend()},     {"alone_ms", median(alone)},
      {"tensor_ms", median(tensor)},    {"sequence_ms", median(sequence)},
      {"tensor_speedup", median(gain)}, {"sequence_speedup", median(sequence_gain)}};
  std::cout << report.dump() << "\n";
}
