// SPDX-License-Identifier: Apache-2.0
// Times training steps of a small Llama without synchronisation (alone) and with DDP, in turns, so
// that their difference is what distribution costs. bench/ddp.py compares with PyTorch's own DDP.
//   lockstep run -n 2 build/bin/bench_ddp --layers 4 --batch 1 --seq 16
// A step is forward, backward, optimizer step and zero_grad. The slowest rank's time counts, for
// both: DDP waits for it, so that is what a step would take if communication were free. Medians
// over the steps; cost is the median difference. Losses are rank 0's in the first steps of DDP.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/optim/adamw.h>
#include <torch/version.h>

#include <CLI/CLI.hpp>
#include <functional>
#include <iostream>
#include <nlohmann/json.hpp>

#include "bench/llama.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/optim/adamw.h"
#include "lockstep/parallel/data/ddp.h"

using namespace lockstep;
using Json = nlohmann::ordered_json;

namespace {

constexpr double kLearningRate = 1e-3;

struct Optimizer {
  std::function<void()> step, zero_grad;
};

Optimizer make_optimizer(const std::string& kind, const bench::Llama& model) {
  if (kind == "torch") {
    auto adamw = std::make_shared<torch::optim::AdamW>(model->parameters(), kLearningRate);
    return {[=] { adamw->step(); },
            [module = model.ptr()] { module->zero_grad(/*set_to_none=*/true); }};
  }
  auto adamw = std::make_shared<optim::AdamW>(*model, optim::AdamWOptions{.lr = kLearningRate});
  return {[=] { adamw->step(); }, [=] { adamw->zero_grad(); }};
}

// A model in training. Its samples are the milliseconds of each step and of its parts.
class Training {
 public:
  Training(std::function<at::Tensor()> forward, Optimizer optimizer)
      : forward_(std::move(forward)), optimizer_(std::move(optimizer)) {}

  double step() {
    const auto start = Clock::now();
    const at::Tensor loss = forward_();
    const double forward = seconds_since(start);
    loss.backward();
    const double backward = seconds_since(start);
    optimizer_.step();
    optimizer_.zero_grad();
    const double end = seconds_since(start);
    samples_.push_back(at::tensor({end, forward, backward - forward, end - backward}, at::kDouble) *
                       1e3);
    return loss.item<double>();
  }

  void forget() { samples_.clear(); }

  // (steps, parts), of the slowest rank.
  at::Tensor samples(const comm::Group& group) const {
    const at::Tensor slowest = at::stack(samples_);
    comm::all_reduce(slowest, group, {.op = comm::ReduceOp::max}).wait();
    return slowest;
  }

 private:
  std::function<at::Tensor()> forward_;
  Optimizer optimizer_;
  std::vector<at::Tensor> samples_;
};

Json medians(const at::Tensor& samples) {
  const at::Tensor median = samples.quantile(0.5, 0);
  const auto part = [&](int64_t i) { return median[i].item<double>(); };
  return {{"step_ms", part(0)},
          {"forward_ms", part(1)},
          {"backward_ms", part(2)},
          {"optimizer_ms", part(3)}};
}

}  // namespace

int main(int argc, char** argv) {
  bench::LlamaOptions model;
  int64_t batch = 4, length = 256;
  int steps = 12;
  double bucket_mb = 25;
  std::string kind = "lockstep";
  CLI::App app("Times training steps alone and with DDP");
  app.add_option("--layers", model.layers);
  app.add_option("--width", model.width);
  app.add_option("--heads", model.heads);
  app.add_option("--ffn", model.ffn);
  app.add_option("--vocab", model.vocabulary);
  app.add_option("--batch", batch, "Sequences per rank");
  app.add_option("--seq", length, "Tokens in a sequence");
  app.add_option("--steps", steps, "Timed steps of each kind");
  app.add_option("--bucket-mb", bucket_mb);
  app.add_option("--optimizer", kind)->check(CLI::IsMember({"lockstep", "torch"}));
  CLI11_PARSE(app, argc, argv);

  const comm::Group group = comm::init();
  const auto tokens = bench::make_tokens(batch, length, model.vocabulary, group.rank());
  bench::Llama plain(model), replica(model);
  auto ddp =
      parallel::ddp(replica, group, {.bucket_bytes = static_cast<size_t>(bucket_mb * (1 << 20))});
  Training alone([&] { return plain->forward(tokens.input, tokens.target); },
                 make_optimizer(kind, plain));
  Training distributed([&] { return ddp.forward(tokens.input, tokens.target); },
                       make_optimizer(kind, replica));

  std::vector<double> losses;
  for (int i = 0; i < 5; ++i) losses.push_back(distributed.step());
  for (int i = 0; i < 2; ++i) alone.step();
  alone.forget();
  distributed.forget();
  for (int i = 0; i < steps; ++i) {
    comm::barrier(group).wait();
    alone.step();
    comm::barrier(group).wait();
    distributed.step();
  }

  const at::Tensor alone_ms = alone.samples(group), ddp_ms = distributed.samples(group);
  int64_t parameters = 0;
  for (const auto& parameter : plain->parameters()) parameters += parameter.numel();
  const Json line = {{"program", "lockstep"},
                     {"torch", TORCH_VERSION},
                     {"optimizer", kind + " AdamW"},
                     {"ranks", group.size()},
                     {"threads", at::get_num_threads()},
                     {"parameters", parameters},
                     {"tokens", batch * length},
                     {"alone", medians(alone_ms)},
                     {"ddp", medians(ddp_ms)},
                     {"cost_ms", medians(ddp_ms - alone_ms)["step_ms"]},
                     {"losses", losses}};
  if (group.rank() == 0) std::cout << line.dump() << std::endl;
}
