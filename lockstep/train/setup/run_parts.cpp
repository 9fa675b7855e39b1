// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/setup/run_parts.h"

#include <algorithm>

#include "lockstep/comm/control/rank_consistency.h"
#include "lockstep/comm/control/rank_texts.h"
#include "lockstep/config/freeze.h"
#include "lockstep/config/plan/planned_run.h"
#include "lockstep/config/run_tokenizer.h"
#include "lockstep/core/format.h"
#include "lockstep/formats/checkpoint_folder.h"

namespace lockstep::train {

using config::TrainConfig;

optim::LrSchedule make_schedule(const TrainConfig& config) {
  return optim::LrSchedule(optim::parse_schedule(config.optim.schedule),
                           {.lr = config.optim.lr,
                            .warmup_steps = config.warmup(),
                            .total_steps = config.train.steps,
                            .decay_steps = config.optim.decay_steps,
                            .min_ratio = config.optim.min_lr_ratio});
}

TrainConfig completed(TrainConfig config, const data::Tokenizer& tokenizer) {
  config.model = config::resolve_model(config, tokenizer.vocab_size());
  config.data.tokenizer = config::tokenizer_name(config);
  return config;
}

config::DataIdentities compared(config::DataIdentities identities, const comm::Group& world) {
  comm::require_same(config::describe(identities), world);
  return identities;
}

std::string copy_identity(const TrainConfig& config, const config::DataIdentities& identities,
                          const comm::Group& world) {
  TrainConfig same = config;
  same.checkpoint.resume = "none";  // a restart sets both
  same.checkpoint.load = config::LoadWhat::all;
  // Copies are about tensors, not ranks. What a step is may not change with their number.
  same.train.global_batch = config.global_batch(world.size());
  same.parallel = {};
  same.run = {};
  return config::to_json(same) + "\n" + config::describe(identities);
}

bool has_checkpoint(const TrainConfig& config, int64_t step, const comm::Group& world) {
  // One rank looks: a network disk may show others something older.
  const auto answers = comm::run_on_all_ranks("recovery", world, [&]() -> std::string {
    if (world.rank() != 0 || config.checkpoint.dir.empty()) return "";
    const auto complete = formats::list_complete(config.checkpoint.dir);
    return std::ranges::any_of(complete, [&](const auto& each) { return each.step == step; })
               ? "yes"
               : "";
  });
  return !answers[0].empty();
}

checkpoint::LoadOptions load_options(const TrainConfig& config) {
  checkpoint::LoadOptions options{.partial = config.checkpoint.partial};
  // The state of parameters that were trained before they were frozen.
  for (const std::string& frozen : config::frozen_tensors(config, config.model))
    options.may_ignore.push_back(format("optim.{}.", frozen));
  return options;
}

std::string measure_of(int64_t tokens, const config::Data& data, const TrainConfig& config) {
  if (!config.checkpoint.best) return "";
  return format("{} tokens of data with {}, seq_len {}", tokens,
                data.validation.identity().describe(), config.train.seq_len);
}

plan::Memory predicted(const TrainConfig& config, const comm::Group& world) {
  const auto ranks = plan::memory_per_rank(config::planned_run(config, config.model, world.size()));
  return ranks[static_cast<size_t>(world.rank())];
}

}  // namespace lockstep::train
