// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/start_lines.h"

#include "lockstep/config/float8.h"
#include "lockstep/config/plan/fit_to_memory.h"
#include "lockstep/config/plan/timed_run.h"
#include "lockstep/config/run_folder.h"
#include "lockstep/core/format.h"
#include "lockstep/core/version.h"
#include "lockstep/data/entropy.h"
#include "lockstep/train/data_report.h"
#include "lockstep/train/progress.h"

namespace lockstep::train {
namespace {

std::string describe_graphs(const config::TrainConfig& config, const config::Data& data) {
  if (config.train.graphs == config::Graphs::off) return "off: train.graphs is off";
  const std::string obstacle = config.graphs_obstacle(data.train.has_examples());
  if (!obstacle.empty()) return "off: " + obstacle;
  return "on: forward and backward are recorded in the third step";
}

}  // namespace

std::vector<std::string> start_lines(const StartFacts& facts) {
  const auto& [config, world, model, data, threads, device, global_batch, accumulation, samples,
               resumed_from, done] = facts;
  std::vector<std::string> lines;
  lines.push_back(format(
      "lockstep {}: {} rank{} ({}), {}, {} on {}", LOCKSTEP_VERSION, world.size(),
      world.size() > 1 ? "s" : "", world.size() > 1 ? world.backend() : "alone", threads,
      config.train.type() == config::Precision::float32 ? "float32" : "bfloat16", device.str()));
  lines.push_back(format("model  {}; {} parameters", config.model.describe(),
                         short_number(static_cast<double>(config.model.parameters()))));
  if (config.train.is_fp8()) {
    lines.push_back(format("fp8    products of {} in each block",
                           join(config::float8_layers(config, config.model))));
  }
  for (const std::string& line : model.describe()) lines.push_back(line);
  if (config.train.fit)
    lines.push_back("       " + config::describe_fit(*config.train.fit, config.model.layers));
  if (config::computes_in_tiles(config,
                                config.parallel.sequence_parallel ? config.parallel.tp : 1)) {
    lines.push_back(
        format("       MLP, norms and loss compute {} tokens of a row at once", config.tile()));
  }
  if (device.is_cuda()) lines.push_back("graphs " + describe_graphs(config, data));
  lines.push_back(format("data   {}", describe(data)));
  if (config.model.vocab <= 256 && !data.train.has_examples()) {
    if (const auto entropy = data::entropy(data.train)) {
      lines.push_back(
          format("       for comparison: a unigram model of these data has loss {:.3f}, a bigram "
                 "model {:.3f}",
                 entropy->unigram, entropy->bigram));
    }
  }
  lines.push_back(
      format("batch  {} rows of {} tokens: {} dp x {} rows x {} accumulated; {} steps, "
             "{} epochs",
             global_batch, config.train.seq_len, config.dp(world.size()), config.train.micro_batch,
             accumulation, config.train.steps,
             format("{:.2f}", static_cast<double>(config.train.steps * global_batch) /
                                  static_cast<double>(samples))));
  const int64_t places = int64_t{config.dp(world.size())} * accumulation,
                micro_batches = global_batch / config.train.micro_batch;
  if (places > micro_batches) {
    lines.push_back(
        format("       {} micro-batches on {} ranks of dp: {} of {} are computed for nothing; a "
               "multiple of {} leaves no rank idle",
               micro_batches, config.dp(world.size()), places - micro_batches, places,
               config.dp(world.size())));
  }
  if (!config.run.dir.empty())
    lines.push_back(format("run    {}", config::shown_path(config.run.dir)));
  if (!config.checkpoint.dir.empty() && config.checkpoint.every == 0)
    lines.push_back("save   at the end; --checkpoint.every N limits what a crash loses");
  if (!resumed_from.empty()) {
    const std::string from = config::shown_path(resumed_from);
    lines.push_back(config.checkpoint.load == config::LoadWhat::all || done > 0
                        ? format("resume {} at step {}", from, done)
                        : format("weights of {}", from));
  }
  return lines;
}

}  // namespace lockstep::train
