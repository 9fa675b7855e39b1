// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/offload/decide_again.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <string>

#include "lockstep/comm/collectives.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/log.h"
#include "lockstep/core/size_text.h"

namespace lockstep::parallel::detail {
namespace {

using layout::OffloadPlan;
using layout::Tier;

// What Lockstep has on a CUDA device of torch's allocator's bytes: what is planned, or less where
// that was never taken. Parameters that ranks read from each other may be in memory of their own.
int64_t managed_by_torch(const ShardEngine& model) {
  const OffloadTiers& tiers = *model.tiers();
  int64_t bytes =
      std::min(layout::pressure(tiers.plan, 0), static_cast<int64_t>(tiers.device_budget.peak()));
  for (const auto& flat : model.flats()) {
    const FlatPlan& each = flat->plan();
    if (each.shard.size() > 1 && each.offload->params == Tier::device &&
        comm::uses_device_memory(each.shard, each.device)) {
      bytes -= static_cast<int64_t>(flat->shard.bytes());
    }
  }
  return bytes;
}

int64_t rounded_up(int64_t bytes, int64_t limit) {
  const int64_t grain = std::max<int64_t>(limit / 64, 1);
  return (bytes + grain - 1) / grain * grain;
}

// State that LZ4 compresses gives way to parameters and gradients that grow: it goes to the disk.
// So what these have now can be planned with, instead of what they have at most.
bool state_gives_way(const OffloadTiers& tiers) {
  const layout::StateCodecs& codecs = tiers.options.codec;
  return tiers.disk &&
         (codecs.exp_avg == codec::Codec::lossless || codecs.exp_avg_sq == codec::Codec::lossless);
}

// The plan has what a flat's parameters and gradients take of the host, where LZ4 compresses them.
// Returns the bytes that are planned no more.
int64_t take_measured(ShardEngine& model, size_t index) {
  if (!state_gives_way(*model.tiers())) return 0;
  const Flat& flat = *model.flats()[index];
  OffloadPlan::Flat& planned = model.tiers()->plan.flats[index];
  int64_t saved = 0;
  const auto take = [&](std::optional<int64_t>& bytes, size_t kept) {
    if (!bytes || kept == 0) return;
    saved += *bytes - static_cast<int64_t>(kept);
    bytes = static_cast<int64_t>(kept);
  };
  if (planned.params == Tier::host && flat.shard.is_packed())
    take(planned.bytes.host_params, flat.shard.bytes());
  const PackedGradient* const gradient = flat.offloaded->packed();
  if (planned.grads == Tier::host && gradient != nullptr)
    take(planned.bytes.host_grads, gradient->bytes());
  return saved;
}

// What has moved, and what should have.
struct Moves {
  int64_t states_to_host = 0, states_to_disk = 0, grads = 0;
  int64_t refused = 0;
  std::string why = {};  // the first refusal

  bool any() const { return states_to_host + states_to_disk + grads > 0; }
};

class Mover {
 public:
  Mover(ShardEngine& model, const ModelUpdates& updates)
      : model_(model), tiers_(*model.tiers()), updates_(updates) {}

  // What LZ4 made of state has moved some of it since the plan was made.
  void update_plan() {
    for (size_t f = 0; f < tiers_.plan.flats.size(); ++f) take_measured(model_, f);
    for_each_slice([&](layout::StateSlice& planned, int64_t& on_host, OffloadedState* state,
                       OffloadedState::Slice* slice) {
      if (slice == nullptr) return;
      planned.tier = slice->place.tier;
      if (state->plan().lossless && planned.tier != Tier::device)
        on_host = static_cast<int64_t>(state->kept_bytes(*slice));
    });
    layout::recount(tiers_.plan);
  }

  Moves run(const OffloadPlan& next) {
    make_ring(next);
    if (moves_.refused > 0) return moves_;
    // What goes from the host to the disk makes room for what comes there from the device.
    move_states(next, Tier::host);
    move_states(next, Tier::device);
    move_gradients(next);
    layout::recount(tiers_.plan);
    show_places();
    return moves_;
  }

 private:
  // Calls visit(planned, bytes on the host, state, slice); the last two are null where nothing
  // updates the tensor.
  template <class Visit>
  void for_each_slice(const Visit& visit) {
    for (size_t f = 0; f < tiers_.plan.flats.size(); ++f) {
      OffloadPlan::Flat& flat = tiers_.plan.flats[f];
      size_t next = 0;
      for (size_t i = 0; i < flat.states.size(); ++i) {
        OffloadedState* const state = updates_.state_of(f, i);
        for (size_t k = 0; k < flat.states[i].slices.size(); ++k) {
          visit(flat.states[i].slices[k], flat.bytes.states[next++].on_host, state,
                state == nullptr ? nullptr : &state->slices()[k]);
        }
      }
    }
  }

  void refuse(int64_t bytes, const std::string& why) {
    moves_.refused += bytes;
    if (moves_.why.empty()) moves_.why = why;
  }

  // What leaves the device passes through it when it is updated. The plan has room for the ring,
  // but on the CPU it may lie in gaps that are too small.
  void make_ring(const OffloadPlan& next) {
    if (tiers_.ring_bytes > 0 || next.used.states == 0) return;
    const auto bytes = static_cast<size_t>(next.ring);
    try {
      updates_.ring = std::make_shared<UpdateRing>(model_.tiers(), tiers_.site, bytes);
      tiers_.ring_bytes = bytes;
    } catch (const OverBudget& error) {
      refuse(layout::may_leave(tiers_.plan), error.what());
    }
  }

  void move_states(const OffloadPlan& next, Tier from) {
    size_t index = 0;
    const std::vector<Tier> wanted = tiers_in(next);
    for_each_slice([&](layout::StateSlice& planned, int64_t&, OffloadedState* state,
                       OffloadedState::Slice* slice) {
      const Tier to = wanted[index++];
      if (planned.tier != from || to <= from) return;
      if (slice == nullptr) {
        planned.tier = to;
        return;
      }
      const auto bytes = static_cast<int64_t>(slice->bytes);
      try {
        if (!state->move(*slice, to)) {
          return refuse(bytes,
                        format("offload.host_budget is {}", size_text(tiers_.options.host_budget)));
        }
      } catch (const Error& error) {  // of the disk
        return refuse(bytes, error.what());
      }
      planned.tier = slice->place.tier;
      (planned.tier == Tier::host ? moves_.states_to_host : moves_.states_to_disk) += bytes;
    });
  }

  static std::vector<Tier> tiers_in(const OffloadPlan& plan) {
    std::vector<Tier> tiers;
    for (const OffloadPlan::Flat& flat : plan.flats) {
      for (const layout::StatePlan& state : flat.states) {
        for (const layout::StateSlice& slice : state.slices) tiers.push_back(slice.tier);
      }
    }
    return tiers;
  }

  void move_gradients(const OffloadPlan& next) {
    GradientMemory& memory = model_.gradient_memory();
    std::vector<size_t> leaving;
    for (size_t f = 0; f < next.flats.size(); ++f) {
      if (next.flats[f].grads == tiers_.plan.flats[f].grads) continue;
      leaving.push_back(f);
      memory.expect(static_cast<size_t>(next.flats[f].gradient_line));
    }
    if (leaving.empty()) return;
    try {
      memory.reserve();  // now, where it is no error of a backward
    } catch (const OverBudget& error) {
      for (const size_t f : leaving) refuse(next.flats[f].bytes.grads, error.what());
      return;
    }
    for (const size_t f : leaving) {
      model_.flats()[f]->offloaded->leave_device();
      tiers_.plan.flats[f].grads = Tier::host;
      tiers_.plan.flats[f].bytes.host_grads = next.flats[f].bytes.host_grads;
      moves_.grads += next.flats[f].bytes.grads;
    }
  }

  // For offload_stats() and for another optimizer of the model.
  void show_places() {
    for (size_t f = 0; f < tiers_.plan.flats.size(); ++f)
      model_.flats()[f]->parameter.offload().states = tiers_.plan.flats[f].states;
    tiers_.kept.moved_to_host = 0;
  }

  ShardEngine& model_;
  OffloadTiers& tiers_;
  const ModelUpdates& updates_;
  Moves moves_;
};

std::string reason(const OffloadPlan& plan, int64_t activations) {
  return format(
      "[offload] activations and temporaries have {}, in addition to {} that rest on the device "
      "and {} for "
      "what is being used there: more than {} x offload.device_limit, {}",
      size_text(activations), size_text(layout::pressure(plan, 0) - plan.working),
      size_text(plan.working), layout::threshold(plan.options.advanced.strategy),
      size_text(plan.options.device_limit));
}

std::string text_of(const Moves& moves) {
  std::string text;
  const auto add = [&](int64_t bytes, const char* what) {
    if (bytes > 0) text += format("{}{} {}", text.empty() ? "" : ", ", size_text(bytes), what);
  };
  add(moves.states_to_host, "of optimizer state moved to the host");
  add(moves.states_to_disk, "of optimizer state moved to the disk");
  add(moves.grads, "of gradients rest on the host from the next backward on");
  return text.empty() ? "nothing moved" : text + "; parameters stay where they are";
}

// Nothing where nothing moved, unless the limit itself is broken now and was not before.
void say(const Moves& moves, const OffloadPlan& before, const OffloadPlan& after) {
  const auto fits = [](const OffloadPlan& plan) {
    return layout::pressure(plan, plan.activations) <= plan.options.device_limit;
  };
  const bool stays_above = !fits(after);
  if (!moves.any() && moves.refused == 0 && (!stays_above || !fits(before))) return;
  std::string text = reason(before, after.activations) + "; " + text_of(moves);
  if (moves.refused > 0)
    text += format("; {} have no room elsewhere and stay: {}", size_text(moves.refused), moves.why);
  if (stays_above) text += "; the device stays above its limit";
  if (moves.refused > 0 || stays_above)
    log::warn(text);
  else
    log::info(text);
}

}  // namespace

std::vector<int64_t> measured_activations(std::span<ShardEngine* const> models) {
  // CUDA's allocator counts for all models; each has the part of it that it has of their limits.
  int64_t managed = 0, limits = 0;
  for (ShardEngine* const model : models) {
    if (model->tiers()->device.is_cuda()) managed += managed_by_torch(*model);
    limits += model->tiers()->options.device_limit;
  }
  std::vector<int64_t> activations;
  for (ShardEngine* const model : models) {
    const OffloadTiers& tiers = *model->tiers();
    const int64_t limit = tiers.options.device_limit;
    int64_t bytes = tiers.activations.bytes(managed);
    if (tiers.device.is_cuda()) {
      bytes = static_cast<int64_t>(static_cast<double>(bytes) * static_cast<double>(limit) /
                                   static_cast<double>(limits));
    }
    activations.push_back(rounded_up(bytes, limit));
  }
  return activations;
}

int64_t agree_on_activations(ShardEngine& model, int64_t activations) {
  const at::Tensor most = at::full({1}, activations, at::kLong);
  comm::all_reduce(most, model.groups().shard, {.op = comm::ReduceOp::max, .tag = "activations"})
      .wait();
  const int64_t agreed = *most.data_ptr<int64_t>();
  OffloadTiers& tiers = *model.tiers();
  tiers.activation_peak = std::max(tiers.activation_peak, agreed);
  return agreed;
}

void agree_on_room(ShardEngine& model) {
  const comm::Group& ranks = model.groups().shard;
  if (ranks.size() == 1 || model.environment().one_sided) return;
  OffloadTiers& tiers = *model.tiers();
  const at::Tensor room = at::full({1}, tiers.plan.used.params, at::kLong);
  comm::all_reduce(room, ranks, {.op = comm::ReduceOp::min, .tag = "room for gathered parameters"})
      .wait();
  tiers.line_room = static_cast<size_t>(*room.data_ptr<int64_t>());
}

void give_room(ShardEngine& model) {
  int64_t saved = 0;
  for (size_t f = 0; f < model.tiers()->plan.flats.size(); ++f) saved += take_measured(model, f);
  if (saved > 0) model.tiers()->state_room.extend(static_cast<size_t>(saved));
}

void decide_again(ShardEngine& model, int64_t activations, const ModelUpdates& updates) {
  OffloadTiers& tiers = *model.tiers();
  if (layout::may_leave(tiers.plan) == 0) {
    const OffloadPlan before = tiers.plan;
    tiers.plan.activations = activations;
    return say({}, before, tiers.plan);
  }
  updates.wait();
  tiers.wait_for_updates();
  Mover mover(model, updates);
  mover.update_plan();
  const OffloadPlan before = tiers.plan;
  tiers.plan.activations = activations;
  ++tiers.decisions;
  try {
    const Moves moves = mover.run(layout::plan_again(before, activations));
    say(moves, before, tiers.plan);
  } catch (const ConfigError& error) {
    log::warn(format("{}; nothing moved: {}", reason(before, activations), error.what()));
  }
  tiers.activations.reset();
}

}  // namespace lockstep::parallel::detail
