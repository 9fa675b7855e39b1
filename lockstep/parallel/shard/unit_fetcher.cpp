// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/shard/unit_fetcher.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/nn/module.h>

#include <algorithm>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/layout/offload_plan.h"

namespace lockstep::parallel::detail {

using When = Residence::When;

Phase current_phase() {
  if (torch::autograd::get_current_graph_task_exec_info() != nullptr) return Phase::backward;
  return at::GradMode::is_enabled() ? Phase::forward : Phase::no_grad;
}

void UnitFetcher::add(Flat& flat) {
  const std::string& name = flat.plan().unit;
  auto unit = std::find_if(units_.begin(), units_.end(),
                           [&](const Unit& each) { return each.name == name; });
  if (unit == units_.end()) unit = units_.insert(units_.end(), {.name = name});
  if (!flat.plan().is_own() && !flat.plan().resident) unit->flats.push_back(&flat);
  unit->kept_for_backward = unit->kept_for_backward || flat.plan().kept_for_backward;
  unit_of_.push_back(static_cast<size_t>(unit - units_.begin()));
  flats_.push_back(&flat);
}

std::vector<std::string> UnitFetcher::names() const {
  std::vector<std::string> names;
  for (const Unit& unit : units_) names.push_back(unit.name);
  return names;
}

void UnitFetcher::acquire(Flat& flat) {
  if (flat.residence->acquire(When::now)) on_acquired_();
}

Prefetch UnitFetcher::prefetch_in(Phase phase) const {
  return phase == Phase::backward ? options_.advanced.backward_prefetch
                                  : options_.advanced.forward_prefetch;
}

// In eval mode no unit waits for a backward, whatever the grad mode.
bool UnitFetcher::evaluates(Phase phase) const {
  if (phase == Phase::backward) return false;
  const auto model = model_.lock();
  return model && !model->is_training();
}

bool UnitFetcher::may_release(const Unit& unit, Phase phase) const {
  if (is_kept(unit)) return false;
  if (!unit.kept_for_backward || phase == Phase::no_grad) return true;
  if (evaluates(phase)) return true;
  // Its backward is still to come.
  return phase == Phase::backward && unit.used_in_backward;
}

void UnitFetcher::release(Unit& unit) {
  for (Flat* flat : unit.flats) flat->residence->release();
}

void UnitFetcher::release_unused() {
  for (Unit& unit : units_) {
    if (!is_kept(unit)) release(unit);
  }
}

void UnitFetcher::release_all() {
  release_unused();
  for (Flat* flat : flats_) {
    if (flat->residence->state() == ParameterState::gathering) acquire(*flat);
  }
}

void UnitFetcher::release_unpinned() {
  for (Unit& unit : units_) {
    if (unit.pins == 0) release(unit);
  }
}

void UnitFetcher::evict() {
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    if (unit != current_ && !held_.contains(unit) && !is_kept(units_[unit])) release(units_[unit]);
  }
}

void UnitFetcher::fetch_ahead(std::span<const size_t> units) {
  for (const size_t unit : units) {
    if (unit == current_) continue;
    for (Flat* flat : units_[unit].flats) {
      flat->residence->acquire(When::ahead);
      if (tiers_ && !tiers_->options.advanced.async_prefetch &&
          flat->residence->state() == ParameterState::gathering) {
        acquire(*flat);
      }
    }
  }
}

std::vector<size_t> UnitFetcher::ahead() const {
  if (!tiers_) return order_.ahead(options_.advanced.prefetch_depth);
  std::vector<size_t> units = order_.ahead(tiers_->options.advanced.prefetch), counts;
  for (const size_t unit : units) {
    size_t count = 0;
    for (const Flat* flat : units_[unit].flats) count += flat->members().size();
    counts.push_back(count);
  }
  units.resize(layout::units_ahead(counts, tiers_->options.advanced.prefetch));
  return units;
}

// Few units are handed to the device before the first of them is computed. A thread that is further
// ahead fills the queue of launches, and waits there with a lock that copying threads need too.
void UnitFetcher::stay_near() {
  constexpr size_t kUnits = 4;
  handed_over_.push_back(memory::computed(tiers_->device));
  if (handed_over_.size() <= kUnits) return;
  handed_over_.front().wait();
  handed_over_.pop_front();
}

void UnitFetcher::use(size_t index) {
  const Phase phase = current_phase();
  const bool begins = order_.use(phase, index);
  current_ = index;
  units_[index].used_in_backward = phase == Phase::backward;
  std::set<size_t> wanted{index};
  std::vector<size_t> next;
  const Prefetch prefetch = prefetch_in(phase);
  if (begins) {
    for (const Flat* flat : units_[index].flats) flat->shard.check_writes();
    if (tiers_) stay_near();
    const bool evaluating = evaluates(phase);
    // A unit that comes a second time begins the next pass.
    if (evaluating && !evaluated_.insert(index).second) evaluated_ = {index};
    if (prefetch != Prefetch::none) {
      next = ahead();
      // Nothing is fetched for a pass that may not come.
      if (evaluating) std::erase_if(next, [&](size_t unit) { return evaluated_.contains(unit); });
      wanted.insert(next.begin(), next.end());
    }
    for (size_t other = 0; other < units_.size(); ++other) {
      Unit& unit = units_[other];
      if (wanted.contains(other) || held_.contains(other) || !may_release(unit, phase)) continue;
      const bool on_its_way = std::any_of(unit.flats.begin(), unit.flats.end(), [](Flat* flat) {
        return flat->residence->state() == ParameterState::gathering;
      });
      if (options_.advanced.limit_all_gathers || !on_its_way) release(unit);
    }
  }
  for (Flat* flat : units_[index].flats) acquire(*flat);
  if (begins && prefetch == Prefetch::pre) fetch_ahead(next);
}

void UnitFetcher::before_operator(std::span<const size_t> flats) {
  held_.clear();
  for (const size_t flat : flats) held_.insert(unit_of_[flat]);
  for (const size_t flat : flats) {
    if (flats_[flat]->plan().resident) {
      acquire(*flats_[flat]);
    } else {
      use(unit_of_[flat]);
    }
  }
}

// After an operator in eval mode.
void UnitFetcher::release_used() {
  const bool over = order_.visit_may_be_over();
  for (const size_t unit : held_) {
    if ((unit != current_ || over) && !is_kept(units_[unit])) release(units_[unit]);
  }
  if (!over || options_.advanced.forward_prefetch != Prefetch::post) return;
  auto next = order_.ahead(options_.advanced.prefetch_depth);
  std::erase_if(next, [&](size_t unit) { return evaluated_.contains(unit); });
  fetch_ahead(next);
}

void UnitFetcher::after_operator() {
  if (drops_always_) return release_all();
  if (current_ == kNone) return;
  const Phase phase = current_phase();
  if (evaluates(phase)) return release_used();
  if (!order_.visit_is_over()) return;
  const bool post = prefetch_in(phase) == Prefetch::post;
  if (!post && phase != Phase::no_grad) return;
  const auto ahead = order_.ahead(post ? options_.advanced.prefetch_depth : 1);
  Unit& unit = units_[current_];
  if (may_release(unit, phase) && !order_.stays()) release(unit);
  if (post) fetch_ahead(ahead);
}

void UnitFetcher::end_pass() {
  order_.end_pass();
  current_ = kNone;
  release_all();
}

void UnitFetcher::pin(const std::string& name, bool waits) {
  const auto fetch = [&](Flat& flat) {
    if (waits) return acquire(flat);
    flat.residence->acquire(When::ahead);
  };
  bool found = false;
  for (Unit& unit : units_) {
    if (!name.empty() && unit.name != name) continue;
    found = true;
    ++unit.pins;
    for (Flat* flat : unit.flats) fetch(*flat);
  }
  for (Flat* flat : flats_) {
    if (flat->plan().resident && (name.empty() || flat->plan().unit == name)) fetch(*flat);
  }
  if (!found && !name.empty()) {
    throw ConfigError(
        format("[fully_shard] there is no unit '{}'; the units are {}", name, join(names())));
  }
}

void UnitFetcher::unpin(const std::string& name) {
  for (Unit& unit : units_) {
    if ((!name.empty() && unit.name != name) || unit.pins == 0) continue;
    --unit.pins;
    if (!is_kept(unit)) release(unit);
  }
}

void UnitFetcher::hold_all() {
  if (tiers_) tiers_->free_retired();
  ++holds_;
  try {
    for (Flat* flat : flats_) acquire(*flat);
  } catch (...) {
    --holds_;
    throw;
  }
}

void UnitFetcher::unhold_all() {
  --holds_;
  release_unused();
}

void UnitFetcher::refresh_kept() {
  for (Flat* flat : flats_) {
    if (flat->plan().resident) flat->residence->acquire(When::ahead);
  }
  for (Unit& unit : units_) {
    if (!is_kept(unit)) continue;
    for (Flat* flat : unit.flats) acquire(*flat);
  }
}

}  // namespace lockstep::parallel::detail
