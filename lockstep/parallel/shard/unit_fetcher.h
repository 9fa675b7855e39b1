// SPDX-License-Identifier: Apache-2.0
// Brings the parameters that operators are about to use, lets others go, and fetches those that
// will be used next. Private: not installed.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "lockstep/core/torch_fwd.h"
#include "lockstep/parallel/flat/flat.h"
#include "lockstep/parallel/shard/options.h"
#include "lockstep/parallel/shard/unit_order.h"

namespace lockstep::parallel::detail {

// Of the thread that asks.
Phase current_phase();

class UnitFetcher {
 public:
  // `on_acquired` is called when memory was taken.
  UnitFetcher(const FullyShardOptions& options, std::weak_ptr<const torch::nn::Module> model,
              std::function<void()> on_acquired)
      : options_(options), model_(std::move(model)), on_acquired_(std::move(on_acquired)) {}
  UnitFetcher(const UnitFetcher&) = delete;
  UnitFetcher& operator=(const UnitFetcher&) = delete;

  // Of an offloaded model.
  void set_tiers(std::shared_ptr<OffloadTiers> tiers) { tiers_ = std::move(tiers); }
  // In the order of their indices.
  void add(Flat& flat);
  std::vector<std::string> names() const;

  // By the thread that computes, before an operator that uses the flats runs, and after it.
  void before_operator(std::span<const size_t> flats);
  void after_operator();
  // Nothing follows: the optimizer's step comes between. What stays has arrived when this returns,
  // so that this rank reads nothing of its peers from here on.
  void end_pass();

  // Brings units (all, if there is no name) and keeps them until unpin(). Without waiting, the
  // operator that uses them first waits.
  void pin(const std::string& unit, bool waits);
  void unpin(const std::string& unit);
  // The same for everything.
  void hold_all();
  void unhold_all();
  // A unit is kept by a caller.
  bool is_kept() const {
    return std::any_of(units_.begin(), units_.end(),
                       [this](const Unit& unit) { return is_kept(unit); });
  }

  // Parameters have new values: brings those that are kept.
  void refresh_kept();
  // And before they have: what was brought is not to be read any more, except by operators.
  void release_unpinned();
  // What was fetched and is not used yet gives way.
  void evict();
  // Drops everything after every operator: for tests of what operators find.
  void drop_always(bool on) { drops_always_ = on; }

 private:
  struct Unit {
    std::string name;
    std::vector<Flat*> flats = {};  // those that come and go
    int pins = 0;
    bool kept_for_backward = false;
    bool used_in_backward = false;  // the last time
  };
  static constexpr size_t kNone = SIZE_MAX;

  void acquire(Flat& flat);
  void use(size_t unit);
  void fetch_ahead(std::span<const size_t> units);  // the nearest first
  std::vector<size_t> ahead() const;
  void stay_near();
  void release(Unit& unit);
  void release_unused();
  void release_all();
  void release_used();
  bool is_kept(const Unit& unit) const { return unit.pins > 0 || holds_ > 0; }
  bool may_release(const Unit& unit, Phase phase) const;
  bool evaluates(Phase phase) const;
  Prefetch prefetch_in(Phase phase) const;

  const FullyShardOptions& options_;
  std::weak_ptr<const torch::nn::Module> model_;
  std::function<void()> on_acquired_;
  std::shared_ptr<OffloadTiers> tiers_;
  std::vector<Flat*> flats_;
  std::vector<size_t> unit_of_;  // per flat
  std::vector<Unit> units_;
  std::set<size_t> held_;  // units of the operator that runs
  size_t current_ = kNone;
  UnitOrder order_;
  std::set<size_t> evaluated_;             // units of the evaluation that runs
  std::deque<memory::Event> handed_over_;  // of an offloaded model: before its last units
  int holds_ = 0;
  bool drops_always_ = false;
};

}  // namespace lockstep::parallel::detail
