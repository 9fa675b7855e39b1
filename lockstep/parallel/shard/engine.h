// SPDX-License-Identifier: Apache-2.0
// A sharded model while it runs: its flats, and what operators on them lead to. Private: not
// installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/core/torch_fwd.h"
#include "lockstep/parallel/flat/flat.h"
#include "lockstep/parallel/shard/gradient_reduction.h"
#include "lockstep/parallel/shard/options.h"
#include "lockstep/parallel/shard/unit_fetcher.h"
#include "lockstep/parallel/shard/write_window.h"

namespace lockstep::parallel::detail {

// The ranks of a sharded model, each in groups of the engine's own.
struct ShardGroups {
  comm::Group all = {};
  comm::Group shard = {};     // parameters are shared out over these
  comm::Group reduce = {};    // the same ranks
  comm::Group replicas = {};  // and are the same on these
};

class ShardEngine : public std::enable_shared_from_this<ShardEngine> {
 public:
  ShardEngine(ShardGroups groups, FullyShardOptions options,
              std::weak_ptr<const torch::nn::Module> model);
  ~ShardEngine();
  ShardEngine(const ShardEngine&) = delete;
  ShardEngine& operator=(const ShardEngine&) = delete;

  // Makes the flats of the plans and begins to listen; once, when a shared_ptr owns this.
  // Collective.
  void start(std::vector<FlatPlan> plans, const FlatShard::ValueOf& value_of,
             std::shared_ptr<OffloadTiers> tiers = nullptr);

  // ---- operators ----
  // Brings what an operator uses. Called by the thread that computes, before it runs.
  void before_operator(std::span<const size_t> flats);
  void after_operator() { units_.after_operator(); }
  // A parameter may be about to be replaced: what set_data() asks first, and model->to() copies.
  // Whether it was is found at the next operator.
  void on_replacement(const Tag& tag, const at::Tensor& view);

  // ---- users ----
  // Brings units (all, if there is no name) and keeps them until units().unpin().
  void pin(const std::string& unit, bool waits = true);

  UnitFetcher& units() { return units_; }
  WriteWindow& window() { return window_; }
  GradientReduction& gradients() { return gradients_; }
  const std::vector<std::unique_ptr<Flat>>& flats() const { return flats_; }
  const ShardGroups& groups() const { return groups_; }
  // None where nothing is offloaded.
  const std::shared_ptr<OffloadTiers>& tiers() const { return tiers_; }
  const FlatEnvironment& environment() const { return *environment_; }
  GradientMemory& gradient_memory() { return environment_->gradient_memory; }
  size_t current_bytes() const;
  size_t peak_bytes() const { return peak_bytes_; }

 private:
  void check_replaced();
  void note_bytes() { peak_bytes_ = std::max(peak_bytes_, current_bytes()); }

  ShardGroups groups_;
  FullyShardOptions options_;
  std::shared_ptr<OffloadTiers> tiers_;  // where something is offloaded
  std::unique_ptr<FlatEnvironment> environment_;
  std::vector<std::unique_ptr<Flat>> flats_;
  UnitFetcher units_;
  WriteWindow window_;
  GradientReduction gradients_;
  const Member* replaced_ = nullptr;  // perhaps
  size_t peak_bytes_ = 0;
  CopyThread copy_thread_;  // last: ends first
};

// ShardedModel::hold() of all models of this rank, which share the budget. The ranks of the group
// hold theirs, or none does.
bool hold(std::span<const std::shared_ptr<ShardEngine>> engines, int64_t budget,
          const comm::Group& group);

}  // namespace lockstep::parallel::detail
