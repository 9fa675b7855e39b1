// SPDX-License-Identifier: Apache-2.0
// The layouts of a run that fit in memory, fastest first. Private: not installed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/config/plan/timed_run.h"
#include "lockstep/config/train_config.h"
#include "lockstep/plan/cluster.h"

namespace lockstep::config {

struct SearchResult {
  std::vector<Prediction> best = {};  // by ranked_time(), as exactly as one layout is planned
  int64_t candidates = 0;             // that the rules allow
  int64_t too_large = 0;              // of them, by an estimate or exactly
  int64_t least_memory = 0;           // bytes of the smallest, 0: no candidate
  std::string smallest = {};          // flags of it
};

// Keys of `origins` that a file or a flag has set stay as they are; all others are searched, but
// the global batch, which is micro_batch x ranks where it is not set. `worlds`: numbers of ranks.
SearchResult search_layouts(const TrainConfig& config, const ModelSpec& model,
                            const Origins& origins, const std::vector<int>& worlds,
                            const plan::Cluster& cluster);

// Bytes of a rank that layouts may take: memory.max_per_device, or the memory of the device.
int64_t memory_limit(const TrainConfig& config, const plan::Cluster& cluster);
// Layouts that leave less than a tenth of the memory count as a tenth slower: allocators that
// retry make some of them much slower.
double ranked_time(const Prediction& prediction, int64_t limit);

// The flags that make the layout out of the defaults: "--parallel.tp 2 --train.micro_batch 4".
std::string layout_flags(const TrainConfig& config);

// Indices of those for which no other is both faster and smaller, by time.
std::vector<size_t> pareto_front(const std::vector<Prediction>& predictions);

}  // namespace lockstep::config
