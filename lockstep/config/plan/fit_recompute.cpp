// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/plan/fit_recompute.h"

#include <algorithm>
#include <limits>

#include "lockstep/config/plan/planned_run.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/size_text.h"
#include "lockstep/plan/memory.h"
#include "lockstep/plan/report.h"

namespace lockstep::config {

void fit_recompute(TrainConfig& config, const ModelSpec& model, int world, int64_t limit) {
  if (!config.train.fit) return;
  // 0 recomputes nothing, `layers` a part of every block, and 2 x `layers` all of every block.
  const int64_t layers = model.layers, usable = limit / 100 * 94;
  config.model = model;
  const auto choose = [&](int64_t level) {
    config.train.fit = level <= layers ? RecomputedBlocks{.selective = level}
                                       : RecomputedBlocks{2 * layers - level, level - layers};
  };
  const auto peak = [&](int64_t level) {
    choose(level);
    const auto ranks = plan::memory_per_rank(planned_run(config, model, world));
    return ranks[plan::largest_total(ranks)].total();
  };
  // One after the other: a block that recomputes may take more for a moment than it saves, so the
  // peak does not always fall.
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int64_t level = 0; level <= 2 * layers; ++level) {
    const int64_t bytes = peak(level);
    if (bytes <= usable) return;
    least = std::min(least, bytes);
  }
  throw ConfigError(format(
      "train.recompute fit: recomputing up to all of the {} blocks, a rank takes at least {}, and "
      "of {} there are {} for it; share the state (parallel.shard, tp, pp), offload it or use a "
      "smaller train.micro_batch",
      layers, size_text(least), size_text(limit), size_text(usable)));
}

std::string describe_fit(const RecomputedBlocks& blocks, int64_t layers) {
  if (blocks.selective + blocks.full == 0) return "recompute nothing: all activations fit";
  return format("recompute a part of {} blocks and all of {}, of {}", blocks.selective, blocks.full,
                layers);
}

}  // namespace lockstep::config
