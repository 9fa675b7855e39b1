// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/plan/elastic.h"

#include <algorithm>

#include "lockstep/config/input_files.h"
#include "lockstep/config/pipeline_choice.h"
#include "lockstep/config/plan/planned_run.h"
#include "lockstep/config/run_tokenizer.h"
#include "lockstep/config/tensor_parallel.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::config {
namespace {

// What run() would throw for this layout; empty: nothing.
std::string refusal(const TrainConfig& config, const ModelSpec& model, int world) {
  try {
    config.validate(world);
    validate_tensor(config, model);
    if (is_pipelined(config.parallel)) layers_per_stage(config.parallel, model.layers);
    require_state_fits(config, model, world);
  } catch (const ConfigError& failure) {
    return failure.what();
  }
  return {};
}

TrainConfig with_axes(TrainConfig config, int tp, int cp, int pp, int world) {
  LayoutConfig& parallel = config.parallel;
  const LayoutConfig before = parallel;
  parallel.tp = tp;
  parallel.cp = cp;
  if (cp == 1) parallel.context.reset();
  parallel.pp = pp;
  if (parallel.dp > 0) parallel.dp = world / (tp * cp * pp);
  if (tp == 1) parallel.sequence_parallel = false;
  if (pp == before.pp) return config;
  parallel.split.clear();
  parallel.schedule_file.clear();
  parallel.group = 0;
  if (parallel.schedule == layout::PipelineSchedule::file) parallel.schedule.reset();
  if (pp > 1) return config;
  parallel.schedule.reset();
  parallel.chunks = 1;
  return config;
}

// Of a job that may have any number of ranks.
TrainConfig with_batch(TrainConfig config, int full) {
  config.train.global_batch = config.global_batch(full);
  return config;
}

std::optional<TrainConfig> keeping_axes(const TrainConfig& config, const ModelSpec& model,
                                        int world) {
  const LayoutConfig& parallel = config.parallel;
  if (world % (parallel.tp * parallel.cp * parallel.pp) != 0) return std::nullopt;
  TrainConfig kept = with_axes(config, parallel.tp, parallel.cp, parallel.pp, world);
  if (!refusal(kept, model, world).empty()) return std::nullopt;
  return kept;
}

std::optional<TrainConfig> changing_axes(const TrainConfig& config, const ModelSpec& model,
                                         int world) {
  const LayoutConfig& parallel = config.parallel;
  for (int tp = parallel.tp; tp >= 1; --tp) {
    for (int cp = parallel.cp; cp >= 1; --cp) {
      for (int pp = parallel.pp; pp >= 1; --pp) {
        if (world % (tp * cp * pp) != 0) continue;
        TrainConfig changed = with_axes(config, tp, cp, pp, world);
        if (refusal(changed, model, world).empty()) return changed;
        if (changed.parallel.shard_size == 0) continue;
        changed.parallel.shard_size = 1;  // in which a hybrid run has whole copies
        if (refusal(changed, model, world).empty()) return changed;
      }
    }
  }
  return std::nullopt;
}

std::optional<ElasticSize> size_for(const TrainConfig& config, const ModelSpec& model, int least,
                                    int left) {
  for (int world = left; world >= least; --world) {
    if (const auto kept = keeping_axes(config, model, world))
      return ElasticSize{world, layout_text(*kept, world)};
  }
  for (int world = left; world >= least; --world) {
    if (const auto changed = changing_axes(config, model, world))
      return ElasticSize{world, layout_text(*changed, world)};
  }
  return std::nullopt;
}

}  // namespace

std::optional<ElasticLayout> elastic_layout(const TrainConfig& given, const ModelSpec& model,
                                            int full, int world) {
  const TrainConfig config = with_batch(given, full);
  if (world == full) return ElasticLayout{config};
  if (auto kept = keeping_axes(config, model, world)) return ElasticLayout{std::move(*kept)};
  if (auto changed = changing_axes(config, model, world))
    return ElasticLayout{std::move(*changed), false};
  return std::nullopt;
}

std::map<int, ElasticSize> elastic_sizes(const TrainConfig& given, const ModelSpec& model) {
  const int least = given.run.min_ranks, full = given.run.ranks;
  const TrainConfig config = with_batch(given, full);
  std::map<int, ElasticSize> sizes;
  for (int left = least; left <= full; ++left) {
    if (const auto size = size_for(config, model, least, left)) sizes[left] = *size;
  }
  if (sizes.contains(least)) return sizes;
  const LayoutConfig& parallel = config.parallel;
  const TrainConfig wanted = with_axes(config, parallel.tp, parallel.cp, parallel.pp, least);
  int nearest = full;
  for (int away = full; away >= 1; --away) {
    for (const int world : {least + away, least - away}) {
      if (world >= 1 && world <= full && size_for(config, model, world, world)) nearest = world;
    }
  }
  throw ConfigError(
      format("-n {}:{}: no layout fits {} (run.min_ranks): {}; the nearest number that works is {}",
             least, full, counted(least, "rank"), refusal(wanted, model, least), nearest));
}

std::string layout_text(const TrainConfig& config, int world) {
  const LayoutConfig& parallel = config.parallel;
  std::string text = format("dp {}", config.dp(world));
  for (const auto& [name, size] :
       {std::pair("tp", parallel.tp), {"cp", parallel.cp}, {"pp", parallel.pp}}) {
    if (size > 1) text += format(" x {} {}", name, size);
  }
  return text;
}

ModelSpec elastic_model(const TrainConfig& config) {
  const bool open = config.model.vocab == 0 && config.model_path.empty();
  return resolve_model(config, open ? open_tokenizer(config).vocab_size() : 0);
}

}  // namespace lockstep::config
