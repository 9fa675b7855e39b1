// SPDX-License-Identifier: Apache-2.0
// Times training steps of a small Llama, alone, with DDP and sharded, and counts their memory.
//   lockstep run -n 2 build/bin/bench_shard_step --mode ddp full --batch 4 --seq 256
// One JSON line for each mode: "bare" trains without synchronisation, "ddp" with DDP, the others
// are strategies of fully_shard. Modes take turns, step by step, so that a disturbance meets all of
// them. A step is forward, backward, optimizer step and zero_grad; the slowest rank's time counts.
// Medians and the best over the timed steps. Memory is told where there is one mode only: see
// memory_of(). bench/shard.py compares with PyTorch.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/version.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <functional>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>

#include "bench/llama.h"
#include "bench/own_memory.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/core/clock.h"
#include "lockstep/optim/adamw.h"
#include "lockstep/parallel/data/ddp.h"
#include "lockstep/parallel/shard/fully_shard.h"

using namespace lockstep;
using Json = nlohmann::ordered_json;

namespace {

// The embedding, each block, the last norm and the head.
bool is_unit(const std::string& path, const torch::nn::Module&) {
  return path.find('.') == std::string::npos;
}

// A model in training. Its samples are the seconds of each step and of its parts.
class Training {
 public:
  Training(std::string mode, const bench::LlamaOptions& sizes, bench::Tokens tokens,
           const comm::Group& group, int hybrid)
      : mode_(std::move(mode)),
        tokens_(std::move(tokens)),
        own_before_(bench::own_memory()),
        resident_before_(bench::resident_memory()),
        model_(sizes) {
    for (const at::Tensor& parameter : model_->parameters())
      parameter_bytes_ += static_cast<int64_t>(parameter.nbytes());
    for (const auto& unit : model_->children()) {
      int64_t bytes = 0;
      for (const at::Tensor& parameter : unit->parameters())
        bytes += static_cast<int64_t>(parameter.nbytes());
      unit_bytes_ = std::max(unit_bytes_, bytes);
    }
    for (const at::Tensor& parameter : model_->parameters()) {
      if (parameter.numel() < parallel::FullyShardOptions().min_num_params)
        whole_bytes_ += static_cast<int64_t>(parameter.nbytes());
    }
    std::vector<optim::NamedParameter> parameters;
    if (mode_ == "bare" || mode_ == "ddp") {
      if (mode_ == "ddp") ddp_.emplace(parallel::ddp(model_, group));
      parameters = optim::named_parameters(*model_);
    } else {
      const auto strategy = layout::parse_sharding_strategy(mode_);
      const bool is_hybrid = strategy == parallel::ShardingStrategy::hybrid_shard;
      sharded_.emplace(
          parallel::fully_shard(*model_, group,
                                {.strategy = strategy,
                                 .units = parallel::ByPredicate(is_unit),
                                 .advanced = {.hybrid_group_size = is_hybrid ? hybrid : 0}}));
      parameters = sharded_->named_parameters();
    }
    optimizer_.emplace(std::move(parameters));
  }

  double step() {
    const auto start = Clock::now();
    const at::Tensor loss = ddp_ ? ddp_->forward(tokens_.input, tokens_.target)
                                 : model_->forward(tokens_.input, tokens_.target);
    const double forward = seconds_since(start);
    loss.backward();
    const double backward = seconds_since(start);
    optimizer_->step();
    optimizer_->zero_grad();
    const double end = seconds_since(start);
    samples_.push_back(at::tensor({end, forward, backward - forward, end - backward}, at::kDouble));
    return loss.item<double>();
  }

  void forget() { samples_.clear(); }

  Json times(const comm::Group& group) const {
    const at::Tensor slowest = at::stack(samples_);  // (steps, parts)
    comm::all_reduce(slowest, group, {.op = comm::ReduceOp::max}).wait();
    const at::Tensor median = slowest.quantile(0.5, 0);
    const auto part = [&](int64_t i) { return median[i].item<double>(); };
    return {{"median_s", part(0)},
            {"best_s", slowest.select(1, 0).min().item<double>()},
            {"forward_s", part(1)},
            {"backward_s", part(2)},
            {"optimizer_s", part(3)}};
  }

  // Bytes of the rank that has most. `counted` is what the books say: parameters and gradients in
  // every form, buffers that are kept from step to step, and optimizer state. `bound` is a rank's
  // share of all parameters, gradients and AdamW's two states, all of those of tensors that are not
  // sharded, and the two largest units each of gathered parameters and of gradients on their way.
  // The rest is the system's count, less what there was before the model: own memory (own_memory.h)
  // after a step and at most during one, and the largest resident set, making the model included.
  Json memory(const comm::Group& group) {
    bench::PeakMemory sampler;
    step();
    const size_t own_peak = sampler.stop();
    const size_t own = bench::own_memory();
    int64_t optimizer = 0;
    for (const auto& [name, tensor] : optimizer_->state())
      optimizer += static_cast<int64_t>(tensor.nbytes());
    const parallel::ShardStats stats = sharded_ ? sharded_->stats() : parallel::ShardStats();
    const int64_t model = sharded_ ? stats.current_bytes : 2 * parameter_bytes_;
    const at::Tensor mine =
        at::tensor({model, stats.gather_bytes, stats.gradient_bytes, optimizer,
                    model + stats.gather_bytes + optimizer, grown(own, own_before_),
                    grown(own_peak, own_before_), grown(bench::resident_peak(), resident_before_)},
                   at::kLong);
    comm::all_reduce(mine, group, {.op = comm::ReduceOp::max}).wait();
    const auto value = [&](int64_t i) { return mine[i].item<int64_t>(); };
    return {{"parameters", parameter_bytes_},
            {"largest_unit", unit_bytes_},
            {"parameters_and_gradients", value(0)},
            {"gathered", value(1)},
            {"gradients_on_their_way", value(2)},
            {"optimizer", value(3)},
            {"counted", value(4)},
            {"bound", 4 * ((parameter_bytes_ - whole_bytes_) / group.size() + whole_bytes_) +
                          4 * unit_bytes_},
            {"own", value(5)},
            {"own_peak", value(6)},
            {"resident_peak", value(7)}};
  }

  Json stats() const {
    const parallel::ShardStats stats = sharded_->stats();
    return {{"local_ratio", stats.local_ratio},
            {"current_bytes", stats.current_bytes},
            {"peak_bytes", stats.peak_bytes},
            {"bytes_saved", stats.bytes_saved},
            {"gather_bytes", stats.gather_bytes},
            {"gradient_bytes", stats.gradient_bytes},
            {"growths", stats.growths},
            {"all_gathers", stats.all_gathers},
            {"fetched_ahead", stats.fetched_ahead},
            {"reduce_scatters", stats.reduce_scatters},
            {"all_reduces", stats.all_reduces}};
  }

  const std::string& mode() const { return mode_; }
  bool is_sharded() const { return sharded_.has_value(); }
  int64_t num_parameters() const { return parameter_bytes_ / static_cast<int64_t>(sizeof(float)); }

 private:
  static int64_t grown(size_t now, size_t before) {
    return static_cast<int64_t>(now) - static_cast<int64_t>(before);
  }

  std::string mode_;
  bench::Tokens tokens_;
  size_t own_before_, resident_before_;
  bench::Llama model_;
  int64_t parameter_bytes_ = 0, whole_bytes_ = 0, unit_bytes_ = 0;
  std::optional<parallel::DistributedDataParallel<bench::Llama>> ddp_;
  std::optional<parallel::ShardedModel> sharded_;
  std::optional<optim::AdamW> optimizer_;
  std::vector<at::Tensor> samples_;
};

}  // namespace

int main(int argc, char** argv) {
  bench::LlamaOptions sizes;
  int64_t batch = 4, length = 256;
  int steps = 7, threads = 0, hybrid = 2;
  std::vector<std::string> modes{"full"};
  CLI::App app("Times training steps and counts their memory: alone, with DDP and sharded");
  app.add_option("--mode", modes)
      ->check(CLI::IsMember({"bare", "ddp", "full", "grad_op", "optimizer", "none", "hybrid"}));
  app.add_option("--layers", sizes.layers);
  app.add_option("--width", sizes.width);
  app.add_option("--heads", sizes.heads);
  app.add_option("--ffn", sizes.ffn);
  app.add_option("--vocab", sizes.vocabulary);
  app.add_option("--batch", batch, "Sequences per rank");
  app.add_option("--seq", length, "Tokens in a sequence");
  app.add_option("--steps", steps, "Timed steps of each mode, after five that are not");
  app.add_option("--threads", threads, "Of a rank; default: as the launcher has set them");
  app.add_option("--hybrid", hybrid, "Ranks that share parameters out among them in mode hybrid");
  CLI11_PARSE(app, argc, argv);
  if (threads > 0) at::set_num_threads(threads);

  const comm::Group group = comm::init();
  const auto tokens = bench::make_tokens(batch, length, sizes.vocabulary, group.rank());
  std::vector<std::unique_ptr<Training>> trainings;
  std::vector<std::vector<double>> losses(modes.size());
  for (const std::string& mode : modes)
    trainings.push_back(std::make_unique<Training>(mode, sizes, tokens, group, hybrid));
  for (size_t i = 0; i < modes.size(); ++i) {
    for (int step = 0; step < 5; ++step) losses[i].push_back(trainings[i]->step());
    trainings[i]->forget();
  }
  for (int step = 0; step < steps; ++step) {
    for (const auto& training : trainings) {
      comm::barrier(group).wait();
      training->step();
    }
  }

  for (size_t i = 0; i < modes.size(); ++i) {
    Training& training = *trainings[i];
    Json line = {{"program", "lockstep"},
                 {"mode", training.mode()},
                 {"torch", TORCH_VERSION},
                 {"ranks", group.size()},
                 {"threads", at::get_num_threads()},
                 {"parameters", training.num_parameters()},
                 {"tokens", batch * length}};
    line.update(training.times(group));
    if (modes.size() == 1) line["memory"] = training.memory(group);
    if (training.is_sharded()) line["stats"] = training.stats();
    line["losses"] = losses[i];
    if (group.rank() == 0) std::cout << line.dump() << std::endl;
  }
}
