// SPDX-License-Identifier: Apache-2.0
// Times steps of a small Llama as a pipeline, and compares them with what the simulator says of the
// same schedule when it is fed with the measured time of every action.
//   lockstep run -n 2 build/bin/bench_pipeline --schedule 1f1b zb-h1 --microbatches 8
// One JSON line for each schedule ("zb-v:2" has two chunks). Schedules take turns, step by step, so
// that a disturbance meets all of them. A step is Pipeline::step(): forward and backward of all
// micro-batches; the slowest rank's time counts, medians over the timed steps. Actions are in
// milliseconds, the mean of a rank's, each the median over the steps. bench/torch_pipeline.py is
// the peer.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/nn/functional/loss.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>

#include "bench/llama.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/core/clock.h"
#include "lockstep/optim/adamw.h"
#include "lockstep/parallel/pipeline/pipeline.h"
#include "lockstep/parallel/pipeline/timeline.h"
#include "lockstep/schedule/simulate.h"

using namespace lockstep;
using Json = nlohmann::ordered_json;
using schedule::Op;

namespace {

struct Sizes {
  bench::LlamaOptions model;
  int64_t batch = 2, length = 256;
  int microbatches = 8;
};

std::vector<parallel::Layer> layers_of(const bench::LlamaOptions& sizes) {
  std::vector<parallel::Layer> layers;
  layers.push_back(parallel::layer(
      "embed", [=] { return torch::nn::Embedding(sizes.vocabulary, sizes.width); }));
  for (int64_t i = 0; i < sizes.layers; ++i) {
    layers.push_back(
        parallel::layer("blocks." + std::to_string(i), [=] { return bench::LlamaBlock(sizes); }));
  }
  layers.push_back(parallel::layer("norm", [=] { return bench::RmsNorm(sizes.width); }));
  layers.push_back(parallel::layer("head", [=] {
    return torch::nn::Linear(torch::nn::LinearOptions(sizes.width, sizes.vocabulary).bias(false));
  }));
  return layers;
}

// Equal shares of the blocks; the embedding with the first, norm and head with the last.
std::vector<int> split_of(const bench::LlamaOptions& sizes, int stages) {
  std::vector<int> split(static_cast<size_t>(stages), static_cast<int>(sizes.layers) / stages);
  split.front() += 1;
  split.back() += 2;
  return split;
}

class Training {
 public:
  Training(const std::string& name, const Sizes& sizes, const comm::Group& group)
      : name_(name.substr(0, name.find(':'))), group_(group), pipeline_(make(name, sizes, group)) {
    for (int i = 0; i < sizes.microbatches; ++i) {
      tokens_.push_back(bench::make_tokens(sizes.batch, sizes.length, sizes.model.vocabulary, i));
    }
    optimizer_.emplace(pipeline_.named_parameters());
  }

  void step() {
    comm::barrier(group_).wait();
    const auto start = Clock::now();
    const double share = 1.0 / static_cast<double>(tokens_.size());
    losses_ = pipeline_.step(
        {.inputs = [&](int i) { return parallel::Tensors{tokens_[static_cast<size_t>(i)].input}; },
         .loss =
             [&](int i, const parallel::Tensors& outputs) {
               return share * torch::nn::functional::cross_entropy(
                                  outputs[0].flatten(0, 1),
                                  tokens_[static_cast<size_t>(i)].target.flatten());
             }});
    seconds_.push_back(seconds_since(start));
    std::vector<double> durations;
    for (const parallel::TimedAction& timed : pipeline_.timeline())
      durations.push_back(std::chrono::duration<double>(timed.end - timed.start).count());
    actions_.push_back(at::tensor(durations, at::kDouble));
    optimizer_->step();
    optimizer_->zero_grad();
  }

  void forget() {
    seconds_.clear();
    actions_.clear();
  }

  Json report() const {
    const schedule::Schedule& schedule = pipeline_.schedule();
    const at::Tensor slowest = at::tensor(seconds_, at::kDouble);
    comm::all_reduce(slowest, group_, {.op = comm::ReduceOp::max}).wait();
    // Every rank has as many actions.
    const at::Tensor mine = at::stack(actions_).quantile(0.5, 0).contiguous();
    const at::Tensor all = at::empty({group_.size(), mine.numel()}, at::kDouble);
    comm::all_gather(all, mine, group_).wait();
    std::map<std::tuple<int, Op, int, int>, double> measured;
    Json means = Json::object();
    for (const auto& [op, letter] :
         {std::pair(Op::forward, "F"), std::pair(Op::backward, "B"),
          std::pair(Op::backward_input, "I"), std::pair(Op::backward_weight, "W")}) {
      Json of_ranks = Json::array();
      for (int rank = 0; rank < group_.size(); ++rank) {
        double sum = 0;
        int count = 0;
        const auto& actions = schedule.actions[static_cast<size_t>(rank)];
        for (size_t i = 0; i < actions.size(); ++i) {
          if (actions[i].op != op) continue;
          const double seconds = all[rank][static_cast<int64_t>(i)].item<double>();
          measured[{rank, op, actions[i].microbatch, actions[i].chunk}] = seconds;
          sum += 1e3 * seconds;
          ++count;
        }
        if (count > 0) of_ranks.push_back(sum / count);
      }
      if (!of_ranks.empty()) means[std::string(letter) + "_ms"] = of_ranks;
    }
    const auto simulation =
        schedule::simulate(schedule, [&](int rank, const schedule::Action& action) {
          return measured.at({rank, action.op, action.microbatch, action.chunk});
        });
    const double median = slowest.quantile(0.5).item<double>();
    Json report{{"schedule", name_},
                {"ranks", schedule.ranks},
                {"microbatches", schedule.microbatches},
                {"chunks", schedule.chunks},
                {"loss", losses_.sum().item<double>()},
                {"median_s", median},
                {"best_s", slowest.min().item<double>()},
                {"simulated_s", simulation.makespan},
                {"measured_to_simulated", median / simulation.makespan},
                {"simulated_bubble", simulation.bubble_makespan}};
    report.update(means);
    return report;
  }

 private:
  static parallel::Pipeline make(const std::string& name, const Sizes& sizes,
                                 const comm::Group& group) {
    const size_t colon = name.find(':');
    const int chunks = colon == std::string::npos ? 1 : std::stoi(name.substr(colon + 1));
    return {layers_of(sizes.model),
            group,
            {.schedule = layout::parse_pipeline_schedule(name.substr(0, colon)),
             .microbatches = sizes.microbatches,
             .chunks = chunks,
             .split = split_of(sizes.model, group.size() * chunks)}};
  }

  std::string name_;
  comm::Group group_;
  parallel::Pipeline pipeline_;
  std::vector<bench::Tokens> tokens_;
  std::optional<optim::AdamW> optimizer_;
  at::Tensor losses_;
  std::vector<double> seconds_;
  std::vector<at::Tensor> actions_;
};

}  // namespace

int main(int argc, char** argv) {
  Sizes sizes;
  sizes.model = {.layers = 8, .width = 512, .heads = 8, .ffn = 1408, .vocabulary = 512};
  std::vector<std::string> schedules{"1f1b", "zb-h1"};
  int warmup = 2, steps = 10, threads = 1;
  CLI::App app("Times pipeline steps");
  app.add_option("--schedule", schedules);
  app.add_option("--microbatches", sizes.microbatches);
  app.add_option("--batch", sizes.batch);
  app.add_option("--seq", sizes.length);
  app.add_option("--layers", sizes.model.layers);
  app.add_option("--width", sizes.model.width);
  app.add_option("--heads", sizes.model.heads);
  app.add_option("--ffn", sizes.model.ffn);
  app.add_option("--vocabulary", sizes.model.vocabulary);
  app.add_option("--warmup", warmup);
  app.add_option("--steps", steps);
  app.add_option("--threads", threads);
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(threads);
  const comm::Group group = comm::init();
  std::vector<std::unique_ptr<Training>> trainings;
  for (const std::string& name : schedules)
    trainings.push_back(std::make_unique<Training>(name, sizes, group));
  for (int i = 0; i < warmup + steps; ++i) {
    for (const auto& training : trainings) {
      if (i == warmup) training->forget();
      training->step();
    }
  }
  for (const auto& training : trainings) {
    const Json report = training->report();
    if (group.rank() == 0) std::cout << report.dump() << "\n";
  }
}
