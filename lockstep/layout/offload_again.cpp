// SPDX-License-Identifier: Apache-2.0
// The decision about places, made again with activations.
#include <algorithm>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/size_text.h"
#include "lockstep/layout/offload_plan.h"

namespace lockstep::layout {
namespace {

// What rests on the device, and is not a part of the working set.
KindBytes resting_of(const OffloadPlan& plan) {
  KindBytes bytes;
  for (const OffloadPlan::Flat& flat : plan.flats) {
    if (flat.sizes.stays) continue;
    if (flat.params == Tier::device) bytes.params += flat.bytes.params;
    if (flat.grads == Tier::device) bytes.grads += flat.bytes.grads;
    size_t next = 0;
    for (const StatePlan& state : flat.states) {
      for (const StateSlice& slice : state.slices) {
        const OffloadUnit::Slice& each = flat.bytes.states[next++];
        if (slice.tier == Tier::device) bytes.states += each.on_device;
      }
    }
  }
  return bytes;
}

// Host memory that the plan's run takes. place() does not count gradients on their way, nor
// unreduced ones, which would fail in the middle of a step where they find no room.
int64_t host_need(const OffloadPlan& plan) {
  int64_t stage = 0;  // for gradients that are added to those of an earlier micro-batch
  for (const OffloadPlan::Flat& flat : plan.flats) {
    if (flat.grads == Tier::host) stage = std::max(stage, flat.bytes.grads);
  }
  return plan.on_host.sum() + plan.host_used + plan.unreduced_on_host + 2 * stage;
}

struct Allowed {
  bool grads;           // may leave the device too
  int64_t host_budget;  // for what place() counts
};

// With everything where it rests already, except for optimizer state, and gradients if allowed.
OffloadPlan placed_again(const OffloadPlan& plan, int64_t activations, const Allowed& allowed) {
  OffloadPlan next = plan;
  next.activations = activations;
  next.options.grads = allowed.grads;
  next.options.host_budget = allowed.host_budget;
  for (OffloadPlan::Flat& flat : next.flats) {
    OffloadPlaces::Unit& now = flat.bytes.now.emplace();
    now.params = flat.params;
    now.grads = flat.grads;
    for (const StatePlan& state : flat.states) {
      for (const StateSlice& slice : state.slices) now.states.push_back(slice.tier);
    }
    if (flat.grads == Tier::device) flat.bytes.host_grads.reset();
  }
  place_flats(next);
  next.options = plan.options;
  for (OffloadPlan::Flat& flat : next.flats) flat.bytes.now.reset();
  recount(next);
  return next;
}

// The same within the host's budget with all that is needed there: if there is a disk, more state
// goes to it.
OffloadPlan fitted_again(const OffloadPlan& plan, int64_t activations, bool grads) {
  const OffloadOptions& options = plan.options;
  const int64_t most = std::min(options.host_budget, options.advanced.host_limit);
  int64_t budget = options.host_budget;
  OffloadPlan next = placed_again(plan, activations, {grads, budget});
  for (;;) {
    const int64_t excess = host_need(next) - std::max(most, host_need(plan));
    if (excess <= 0) return next;
    budget -= excess;
    if (options.disk.empty() || next.on_host.states == 0 ||
        budget < next.on_host.params + next.on_host.grads) {
      throw ConfigError(
          format("offload.host_budget is {}, but {} are offloaded, with what is on its way",
                 size_text(most), size_text(host_need(next))));
    }
    next = placed_again(plan, activations, {grads, budget});
  }
}

}  // namespace

int64_t pressure(const OffloadPlan& plan, int64_t activations) {
  return resting_of(plan).sum() + plan.working + activations;
}

int64_t may_leave(const OffloadPlan& plan) {
  const KindBytes resting = resting_of(plan);
  return (plan.options.grads ? resting.grads : 0) + (plan.options.optimizer ? resting.states : 0);
}

bool breaks_margin(const OffloadPlan& plan, int64_t activations) {
  const double most =
      threshold(plan.options.advanced.strategy) * static_cast<double>(plan.options.device_limit);
  return activations > plan.activations && static_cast<double>(pressure(plan, activations)) > most;
}

OffloadPlan plan_again(const OffloadPlan& plan, int64_t activations) {
  if (plan.options.grads) {
    try {
      return fitted_again(plan, activations, /*grads=*/true);
    } catch (const ConfigError&) {  // the host has no room for gradients
      return fitted_again(plan, activations, /*grads=*/false);
    }
  }
  return fitted_again(plan, activations, /*grads=*/false);
}

}  // namespace lockstep::layout
