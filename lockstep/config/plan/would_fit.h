// SPDX-License-Identifier: Apache-2.0
// A change to a run that is too large, with which it fits. Private: not installed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "lockstep/config/model/model_spec.h"
#include "lockstep/config/train_config.h"

namespace lockstep::config {

struct Change {
  std::string flags;  // "--parallel.shard full --train.recompute full"
  int64_t bytes = 0;  // of the largest rank then
};

// Of a limit, what a prediction may use: predictions are up to 7 % low (docs/memory.md).
constexpr int64_t safe_part_of(int64_t limit) { return limit / 10 * 9; }

// The first of a short list, the smallest changes first, with which every rank stays within the
// safe part of memory.max_per_device: recomputation, sharding, pp and tp on the same ranks, smaller
// micro-batches of the same batch, offload, then more ranks. None where nothing on the list is
// enough. The configuration must be valid for `world` ranks.
std::optional<Change> would_fit(const TrainConfig& config, const ModelSpec& model, int world);

}  // namespace lockstep::config
