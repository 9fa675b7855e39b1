// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/shard/gradient_reduction.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/control/missing_peer.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/log.h"
#include "lockstep/core/trace.h"

namespace lockstep::parallel::detail {

void GradientReduction::start(FlatEnvironment& environment, std::weak_ptr<GradientReduction> self) {
  environment_ = &environment;
  scaling_.start(flats_);
  std::vector<at::Tensor> parameters;
  for (size_t f = 0; f < flats_.size(); ++f) {
    const auto& members = flats_[f]->members();
    arrived_.emplace_back(members.size(), 0);
    if (!flats_[f]->plan().trained) continue;
    for (size_t m = 0; m < members.size(); ++m) {
      parameters.push_back(members[m].tensor);
      places_.push_back({f, m});
    }
  }
  // Backward produces gradients roughly in reverse; the first one tells better. Whole tensors are
  // those of all units, so they are complete at its end.
  for (size_t i = flats_.size(); i-- > 0;) {
    if (flats_[i]->plan().trained) launch_order_.push_back(i);
  }
  std::stable_partition(launch_order_.begin(), launch_order_.end(),
                        [&](size_t i) { return flats_[i]->plan().shard.size() > 1; });
  rounds_.listen(parameters, std::move(self), /*before=*/true);
}

bool GradientReduction::open_round(bool in_backward) {
  const bool syncs = no_sync_ == 0 || options_.no_sync == NoSyncGradients::sharded;
  const bool is_last = !in_backward || no_sync_ == 0;
  events_.opens();
  in_backward_ = in_backward;
  round_syncs_ = !in_backward || syncs;
  num_launched_ = 0;
  late_ = false;
  arrival_order_.clear();
  for (size_t f = 0; f < flats_.size(); ++f) {
    flats_[f]->gradients->begin_round(is_last);
    for (size_t m = 0; m < arrived_[f].size(); ++m) {
      if (!flats_[f]->gradients->has_unreduced(m)) arrived_[f][m] = 0;  // dropped since
    }
  }
  return true;
}

void GradientReduction::reduce_now() {
  if (options_.no_sync == NoSyncGradients::sharded) return;  // every backward did
  const std::lock_guard lock(rounds_.mutex());
  rounds_.run();
}

void GradientReduction::begin_backward() {
  const std::lock_guard lock(rounds_.mutex());
  rounds_.begin_backward();
}

// Peers may be in the reductions that the backward began.
void GradientReduction::abandon_round() {
  for (const auto& flat : flats_) {
    try {
      flat->gradients->abandon();
    } catch (const std::exception& error) {
      log::warn(format("[fully_shard] rank {}: after a backward that failed: {}", group_.rank(),
                       error.what()));
    }
  }
  under_way_.clear();
  for (auto& members : arrived_) std::fill(members.begin(), members.end(), 0);
}

void GradientReduction::before_gradient(size_t parameter) {
  begin_backward();
  const auto [flat, member] = places_[parameter];
  flats_[flat]->gradients->before_accumulation(member);
}

void GradientReduction::on_gradient(size_t parameter, bool is_new) {
  const auto [index, member] = places_[parameter];
  Flat& flat = *flats_[index];
  if (!is_new || !flat.members()[member].tensor.grad().defined()) return;
  const std::lock_guard lock(rounds_.mutex());
  rounds_.begin_backward();
  arrived_[index][member] = 1;
  const auto launched = launch_order_.begin() + static_cast<int64_t>(num_launched_);
  if (std::find(launch_order_.begin(), launched, index) != launched) {
    late_ = true;  // all ranks hear of it at the end of the round
    flat.gradients->before_accumulation(member);
    return;
  }
  flat.gradients->arrive(member, [this] { return make_room(); });
  events_.memory_changed();
  if (!flat.gradients->is_complete()) return;
  arrival_order_.push_back(index);
  if (!round_syncs_) return flat.gradients->spill();
  launch_complete();
}

void GradientReduction::launch_complete() {
  while (num_launched_ < launch_order_.size() &&
         flats_[launch_order_[num_launched_]]->gradients->is_complete()) {
    launch(*flats_[launch_order_[num_launched_]]);
    ++num_launched_;
  }
}

void GradientReduction::launch(Flat& flat) {
  flat.gradients->launch([this] { return make_room(); },
                         {.index = micro_batch_, .is_new = in_backward_});
  under_way_.push_back(&flat);
  // No other rank takes part: what follows can begin.
  if (flat.plan().gradient_group().size() == 1) make_room();
  ++(flat.plan().scatters() ? environment_->counts.reduce_scatters
                            : environment_->counts.all_reduces);
  events_.memory_changed();
}

// Ends the reduction that was begun first.
bool GradientReduction::make_room() {
  if (under_way_.empty()) return false;
  comm::with_peer_hint(kUseByAllRanks, [this] { under_way_.front()->gradients->wait_reduced(); });
  under_way_.erase(under_way_.begin());
  return true;
}

void GradientReduction::close_round() {
  events_.ends();
  if (round_syncs_) return comm::with_peer_hint(kUseByAllRanks, [this] { reduce_round(); });
  for (const size_t index : launch_order_)
    flats_[index]->gradients->keep_for_later([this] { return make_room(); }, micro_batch_);
}

// A parameter that no optimizer has, and that has a gradient; null: there is none.
const Member* GradientReduction::find_unfrozen() const {
  for (const auto& flat : flats_) {
    if (flat->plan().trained) continue;
    for (const Member& member : flat->members()) {
      if (member.tensor.requires_grad() && member.tensor.grad().defined()) return &member;
    }
  }
  return nullptr;
}

// Parameters that are updated as one tensor are updated where one of them has no gradient, too. One
// that was frozen must not be.
static void require_not_frozen(const Flat& flat, std::span<const int64_t> num_ranks) {
  if (!flat.plan().trained || flat.plan().is_own() || !flat.plan().updates_as_one) return;
  if (std::ranges::all_of(num_ranks, [](int64_t count) { return count == 0; })) return;
  for (size_t i = 0; i < num_ranks.size(); ++i) {
    const Member& member = flat.members()[i];
    if (num_ranks[i] > 0 || member.tensor.requires_grad()) continue;
    throw Error(
        format("[fully_shard] parameter {} was frozen after the model was sharded, but unit {} is "
               "updated as one tensor: decay and momentum would change it; freeze first, then "
               "shard, or set use_orig_params",
               member.name, flat.plan().unit));
  }
}

void GradientReduction::reduce_round() {
  const trace::Span span("shard", "finish gradients");
  const Member* const unfrozen = find_unfrozen();
  std::vector<int64_t> mine{late_ ? 1 : 0, unfrozen != nullptr ? 1 : 0};
  for (const int64_t fact : scaling_.facts()) mine.push_back(fact);
  for (const auto& members : arrived_) mine.insert(mine.end(), members.begin(), members.end());
  for (auto& members : arrived_) std::fill(members.begin(), members.end(), 0);
  while (num_launched_ < launch_order_.size()) {
    launch(*flats_[launch_order_[num_launched_]]);
    ++num_launched_;
  }
  const at::Tensor totals = at::tensor(mine, at::kLong);
  comm::Work comparing = comm::all_reduce(totals, group_, {.tag = "which gradients there are"});
  while (make_room()) {
  }
  comparing.wait();
  const int64_t* total = totals.data_ptr<int64_t>();
  if (*total++ > 0) {
    throw Error(
        "[fully_shard] a parameter got another gradient after its own was sent; a block that runs "
        "its own backward inside backward must not share parameters: use parallel::recompute");
  }
  if (*total++ > 0) {
    throw Error(format(
        "[fully_shard] parameter {} is trained, but was frozen when the model was sharded: its "
        "gradients are not averaged, and no optimizer has it; unfreeze first, then shard",
        unfrozen != nullptr ? unfrozen->name : "of another rank"));
  }
  scaling_.require_same(
      std::span<const int64_t, ScalingWatch::kFacts>(total, ScalingWatch::kFacts));
  total += ScalingWatch::kFacts;
  const int64_t* members = total;
  for (const auto& flat : flats_) {
    require_not_frozen(*flat, {members, flat->members().size()});
    members += flat->members().size();
  }
  for (const auto& flat : flats_) {
    const size_t count = flat->members().size();
    flat->gradients->finalize_gradients({total, count});
    total += count;
  }
  for (const auto& flat : flats_) flat->gradients->wait_delivered();
  scaling_.after_reduction();
  events_.reduced();
  if (!learned_ && in_backward_) learn_launch_order();
}

// After the first backward: in the order in which gradients were complete on rank 0; those that
// were not, last. Where the first guess was wrong, gradients had to wait, in memory of their own.
void GradientReduction::learn_launch_order() {
  learned_ = true;
  std::vector<int64_t> order;
  const auto add = [&](size_t index) {
    if (std::find(order.begin(), order.end(), static_cast<int64_t>(index)) == order.end())
      order.push_back(static_cast<int64_t>(index));
  };
  for (const size_t index : arrival_order_) add(index);
  for (const size_t index : launch_order_) add(index);
  const at::Tensor agreed = at::tensor(order, at::kLong);
  comm::broadcast(agreed, group_, {.tag = "order of gradients"}).wait();
  const int64_t* first = agreed.data_ptr<int64_t>();
  launch_order_.assign(first, first + agreed.numel());
  environment_->gradient_memory.trim();
}

}  // namespace lockstep::parallel::detail
