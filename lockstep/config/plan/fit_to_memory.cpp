// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/plan/fit_to_memory.h"

#include <algorithm>
#include <limits>

#include "lockstep/config/plan/planned_run.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/size_text.h"
#include "lockstep/plan/memory.h"
#include "lockstep/plan/report.h"

namespace lockstep::config {

namespace {

int64_t usable_of(int64_t limit) { return limit / 100 * 94; }

int64_t peak_of(const TrainConfig& config, const ModelSpec& model, int world) {
  const auto ranks = plan::memory_per_rank(planned_run(config, model, world));
  return ranks[plan::largest_total(ranks)].total();
}

// The least peak that was found, where none fits.
std::optional<int64_t> fit_recomputation(TrainConfig& config, const ModelSpec& model, int world,
                                         int64_t limit) {
  // 0 recomputes nothing, `layers` a part of every block, and 2 x `layers` all of every block.
  const int64_t layers = model.layers;
  const auto choose = [&](int64_t level) {
    config.train.fit = level <= layers ? RecomputedBlocks{.selective = level}
                                       : RecomputedBlocks{2 * layers - level, level - layers};
  };
  // One after the other: a block that recomputes may take more for a moment than it saves, so the
  // peak does not always fall.
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int64_t level = 0; level <= 2 * layers; ++level) {
    choose(level);
    const int64_t bytes = peak_of(config, model, world);
    if (bytes <= usable_of(limit)) return std::nullopt;
    least = std::min(least, bytes);
  }
  return least;
}

}  // namespace

bool chooses_by_memory(const TrainConfig& config) {
  return config.train.fit || (!config.train.tile && config.tile() > 0);
}

void fit_to_memory(TrainConfig& config, const ModelSpec& model, int world, int64_t limit) {
  if (!chooses_by_memory(config) || limit == 0) return;
  config.model = model;
  if (!config.train.tile && config.tile() > 0) {
    config.train.found_tile = 0;
    const bool fits = config.train.fit ? !fit_recomputation(config, model, world, limit)
                                       : peak_of(config, model, world) <= usable_of(limit);
    if (fits) return;
    config.train.found_tile = kLongTile;
  }
  if (!config.train.fit) return;
  if (const auto least = fit_recomputation(config, model, world, limit)) {
    throw ConfigError(format(
        "train.recompute fit: recomputing up to all of the {} blocks, a rank takes at least {}, "
        "and of {} there are {} for it; share the state (parallel.shard, tp, pp), offload it or "
        "use a smaller train.micro_batch",
        model.layers, size_text(*least), size_text(limit), size_text(usable_of(limit))));
  }
}

std::string describe_fit(const RecomputedBlocks& blocks, int64_t layers) {
  if (blocks.selective + blocks.full == 0) return "recompute nothing: all activations fit";
  return format("recompute a part of {} blocks and all of {}, of {}", blocks.selective, blocks.full,
                layers);
}

}  // namespace lockstep::config
