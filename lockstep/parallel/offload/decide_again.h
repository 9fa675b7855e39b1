// SPDX-License-Identifier: Apache-2.0
// Activations that a step has shown, and what moves because of them. Private: not installed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "lockstep/parallel/offload/offload.h"
#include "lockstep/parallel/shard/engine.h"
#include "lockstep/parallel/tiers/offloaded_state.h"
#include "lockstep/parallel/tiers/update_ring.h"

namespace lockstep::parallel::detail {

// What the steps since the last decision had of the device in addition to what Lockstep manages, at
// most: for each of one rank's models. In units of 1/64 of the model's device_limit, rounded up, so
// that a few bytes more or less decide nothing.
std::vector<int64_t> measured_activations(std::span<ShardEngine* const> models);

// Ranks that share the model's parameters take the most of theirs. Notes it for offload_stats().
// Collective.
int64_t agree_on_activations(ShardEngine& model, int64_t activations);

// The same for the room for gathered parameters, which the last decision may have changed: only
// where gathers are collectives, which ranks must begin alike. Collective.
void agree_on_room(ShardEngine& model);

// What LZ4 leaves of the host that was planned for parameters and gradients is for optimizer state
// that it compresses too. Where they grow later, that goes to the disk. While no update runs.
void give_room(ShardEngine& model);

// Measured, for OffloadStats and the log. By any thread.
OffloadStats::Kept kept_params(const ShardEngine& engine);
OffloadStats::Kept kept_grads(const ShardEngine& engine);

// How the optimizer updates a model.
struct ModelUpdates {
  std::shared_ptr<UpdateRing>& ring;
  // The state of a flat's optimized tensor; null: nothing updates it.
  std::function<OffloadedState*(size_t flat, size_t tensor)> state_of;
  std::function<void()> wait;  // until none is outstanding
};

// Decides again what rests where, with these activations, which break the margin of the model's
// plan, and moves what has to move; makes the ring where it is needed now. Says what moved in one
// line of the log, and in a warning where something found no room or the limit is exceeded.
// Everything keeps its bits.
void decide_again(ShardEngine& model, int64_t activations, const ModelUpdates& updates);

}  // namespace lockstep::parallel::detail
