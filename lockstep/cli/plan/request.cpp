// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <filesystem>
#include <iostream>

#include "lockstep/cli/plan/verbs.h"
#include "lockstep/config/input_files.h"
#include "lockstep/config/model_source.h"
#include "lockstep/config/pipeline_choice.h"
#include "lockstep/config/run_tokenizer.h"
#include "lockstep/config/tensor_parallel.h"
#include "lockstep/config/train_arguments.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::cli {
namespace {

using config::TrainConfig;
using Words = std::vector<std::string>;

// The data need not be there; the vocabulary must.
config::ModelSpec model_of(const TrainConfig& config) {
  const bool open = config.model.vocab == 0 && config.model_path.empty();
  return config::resolve_model(config, open ? config::open_tokenizer(config).vocab_size() : 0);
}

std::optional<Request> parsed_request(const Words& arguments) {
  const auto parsed = config::parse_train_arguments(arguments);
  if (parsed.help) {
    std::cout << kPlanHelp;
    return std::nullopt;
  }
  TrainConfig config = parsed.config;
  // A checkpoint of the machine that is planned for need not be here.
  if (const std::string& resume = config.checkpoint.resume;
      parsed.continued.empty() && (std::filesystem::exists(resume) || resume == "none"))
    config::complete_model(config, parsed.origins);
  if (config.data.path.empty()) config.data.path = "any";  // a run must have some
  return Request{config, {}, parsed.ranks.value_or(0), parsed.origins};
}

}  // namespace

std::string layout_text(const TrainConfig& config, const config::ModelSpec& model, int world) {
  std::string text = format("{} on {} rank{}: {}", model.describe(), world, world > 1 ? "s" : "",
                            config.describe_dims(world));
  if (config.parallel.order != layout::Order::pp_fastest)
    text += format(" in order {}", layout::name_of(config.parallel.order));
  if (config.parallel.shard != layout::ShardingStrategy::no_shard)
    text += format(", shard {}{}", name_of(config.parallel.shard),
                   config.parallel.shard_granularity == layout::ShardGranularity::tensors
                       ? " by whole tensors"
                       : "");
  if (config::is_pipelined(config.parallel)) {
    text += format(", {}", layout::name_of(config::schedule_options(config, world).kind));
    if (config.parallel.chunks > 1) text += format(" with {} chunks", config.parallel.chunks);
  }
  const int count = config.accumulation(world);
  return text + format("; {} micro-batch{} of {} x {} tokens, recompute {}", count,
                       count > 1 ? "es" : "", config.train.micro_batch, config.train.seq_len,
                       config.train.fit ? "fit" : layout::name_of(config.recompute()));
}

std::optional<Request> read_open_request(const Words& arguments) {
  auto request = parsed_request(arguments);
  if (request) request->model = model_of(request->config);
  return request;
}

std::optional<Request> read_request(const Words& arguments) {
  auto request = parsed_request(arguments);
  if (!request) return std::nullopt;
  const TrainConfig& config = request->config;
  const int64_t least = layout::ParallelDims{.dp = std::max(1, config.parallel.dp),
                                             .tp = std::max(1, config.parallel.tp),
                                             .pp = std::max(1, config.parallel.pp)}
                            .world_size();
  if (request->world == 0)
    request->world = static_cast<int>(
        std::min<int64_t>(std::min<int64_t>(least, 1 << 24) * config.parallel.cp, 1 << 24));
  config.validate(request->world);
  request->model = model_of(config);
  config::validate_tensor(config, request->model);
  return request;
}

Words take_values(Words& arguments, const std::string& name) {
  Words values;
  for (auto word = arguments.begin(); word != arguments.end();) {
    if (word->starts_with(name + "=")) {
      values.push_back(word->substr(name.size() + 1));
      word = arguments.erase(word);
    } else if (*word == name) {
      if (word + 1 == arguments.end()) throw ConfigError(format("{} has no value", name));
      values.push_back(*(word + 1));
      word = arguments.erase(word, word + 2);
    } else {
      ++word;
    }
  }
  return values;
}

bool take_switch(Words& arguments, const std::string& name) {
  return std::erase(arguments, name) > 0;
}

}  // namespace lockstep::cli
