// SPDX-License-Identifier: Apache-2.0
// The layouts of a run that continues with fewer ranks than it was started with. Private: not
// installed.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "lockstep/config/train_config.h"

namespace lockstep::config {

struct ElasticLayout {
  TrainConfig config = {};   // valid for that many ranks
  bool changes_less = true;  // tp, cp, pp and shard_size are those of the run; dp is what is left
};

// The layout on `world` ranks of a run that has `full` ranks when none is lost, by this rule:
//   1. parallel.tp, cp, pp and shard_size stay, and parallel.dp is what the ranks leave;
//   2. where that is not valid: the largest valid parallel.tp, of these the largest cp, of these
//   the
//      largest pp, none above the run's. Options of pipelines that do not fit are left out.
// train.global_batch, micro_batch and seed stay. Nothing where no layout is valid. The same on all
// ranks. `model`: with all its sizes.
std::optional<ElasticLayout> elastic_layout(const TrainConfig& config, const ModelSpec& model,
                                            int full, int world);

// What to start where so many places are left, from run.min_ranks to run.ranks: the most ranks that
// keep tp, cp and pp, or else the most that have a layout; and that layout in words. ConfigError,
// with the nearest number that works, where run.min_ranks has none.
struct ElasticSize {
  int ranks = 0;
  std::string layout = {};
};
std::map<int, ElasticSize> elastic_sizes(const TrainConfig& config, const ModelSpec& model);

// "dp 3 x tp 2"
std::string layout_text(const TrainConfig& config, int world);

// The model of a valid configuration with all its sizes, the same in the launcher and in its ranks.
ModelSpec elastic_model(const TrainConfig& config);

}  // namespace lockstep::config
