// SPDX-License-Identifier: Apache-2.0
#include "lockstep/plan/run_description.h"

namespace lockstep::plan {

std::vector<Stage> stages_of(const Run& run) {
  if (!run.pipeline) return {{.first = 0, .count = run.model.layers.size()}};
  std::vector<Stage> stages;
  size_t first = 0;
  for (const int layers : run.layers_per_stage) {
    stages.push_back({.first = first, .count = static_cast<size_t>(layers)});
    first = stages.back().end();
  }
  return stages;
}

std::vector<std::vector<Stage>> chunks_per_rank(const Run& run,
                                                const schedule::Pipeline& pipeline) {
  const std::vector<Stage> stages = stages_of(run);
  std::vector<std::vector<Stage>> ranks(static_cast<size_t>(pipeline.ranks));
  for (int rank = 0; rank < pipeline.ranks; ++rank) {
    for (int chunk = 0; chunk < pipeline.chunks; ++chunk) {
      const auto stage = static_cast<size_t>(pipeline.stage(rank, chunk));
      ranks[static_cast<size_t>(rank)].push_back(stages[stage]);
    }
  }
  return ranks;
}

std::vector<int> rank_per_layer(const Run& run) {
  std::vector<int> ranks(run.model.layers.size(), 0);
  if (!run.pipeline) return ranks;
  const schedule::Schedule schedule = schedule::generate(*run.pipeline);
  const std::vector<Stage> stages = stages_of(run);
  for (size_t i = 0; i < stages.size(); ++i) {
    const int rank = schedule.place(static_cast<int>(i)).rank;
    for (size_t layer = stages[i].first; layer < stages[i].end(); ++layer) ranks[layer] = rank;
  }
  return ranks;
}

}  // namespace lockstep::plan
