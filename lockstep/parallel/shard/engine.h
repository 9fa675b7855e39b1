// SPDX-License-Identifier: Apache-2.0
// Everything that happens while a sharded model runs.
//
// Operators say which flats they are about to use; the engine gathers them, lets others go and
// fetches those that will be used next. Gradients arrive one by one, are laid into their flat's
// line, and full lines are reduced in an order that all ranks share. Shards may be written from the
// end of a backward to the next use of a parameter, which is the window; then they are shown to the
// other ranks, and nothing is read before all have shown theirs. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/core/torch_fwd.h"
#include "lockstep/parallel/flat/buffers.h"
#include "lockstep/parallel/flat/copy_thread.h"
#include "lockstep/parallel/shard/flat.h"
#include "lockstep/parallel/shard/options.h"
#include "lockstep/parallel/shard/order.h"

namespace torch::autograd {
struct Node;
}

namespace lockstep::parallel::detail {

// The ranks of a sharded model, each in groups of the engine's own.
struct ShardGroups {
  comm::Group all = {};
  comm::Group shard = {};     // parameters are shared out over these
  comm::Group reduce = {};    // the same ranks
  comm::Group replicas = {};  // and are the same on these
};

struct ShardCounts {
  int64_t all_gathers = 0;
  int64_t reduce_scatters = 0;
  int64_t all_reduces = 0;
  int64_t fetched_ahead = 0;  // of the all-gathers
};

class ShardEngine : public std::enable_shared_from_this<ShardEngine> {
 public:
  ShardEngine(ShardGroups groups, FullyShardOptions options,
              std::weak_ptr<const torch::nn::Module> model);
  ~ShardEngine();
  ShardEngine(const ShardEngine&) = delete;
  ShardEngine& operator=(const ShardEngine&) = delete;

  // Whether some engine waits for the parameter's gradients.
  static bool listens_to(const at::Tensor& parameter);

  // Makes the flats of the plans and begins to listen; once, when a shared_ptr owns this.
  // Collective.
  void start(std::vector<FlatPlan> plans, const Flat::ValueOf& value_of,
             std::shared_ptr<OffloadTiers> tiers = nullptr);

  // ---- operators ----
  // Gathers what an operator uses. Called by the thread that computes, before it runs.
  void before_operator(std::span<const size_t> flats);
  void after_operator();
  // Throws Error unless the shard may be written now.
  void before_write(const Tag& tag, const at::Tensor& view);
  bool allows_writing() const { return writers_ > 0; }
  // Whether an offloaded model's optimizer may step now; it writes shards past operators.
  bool allows_step() const { return window_; }
  void before_step();
  // A parameter may be about to be replaced: what set_data() asks first, and model->to() copies.
  // Whether it was is found at the next operator.
  void on_replacement(const Tag& tag, const at::Tensor& view);

  // The gradient that a parameter shows is set to zero: what model->zero_grad() does.
  void on_zero(const Tag& tag, const at::Tensor& view);

  // ---- users ----
  void change_no_sync(int change) { no_sync_ += change; }
  void set_micro_batch(std::optional<int64_t> index) { micro_batch_ = index; }
  // Reduces what backward passes under no_sync left; collective.
  void reduce_now();
  // Shards may be written after this; collective.
  void begin_update();
  // Gathers units (all, if there is no name) and keeps them until unpin(). Without waiting, whoever
  // uses them first waits.
  void pin(const std::string& unit, bool waits = true);
  void unpin(const std::string& unit);
  // Gathers and keeps everything until end_summon(). To write, collective: when it returns, no rank
  // reads another's shard, and none does before the next use after end_summon(), which writes this
  // rank's part back.
  void begin_summon(bool writes);
  void end_summon(bool writes);
  // Drops everything after every operator: for tests of what operators find.
  void drop_always(bool on) { drops_always_ = on; }

  const std::vector<std::unique_ptr<Flat>>& flats() const { return flats_; }
  const ShardGroups& groups() const { return groups_; }
  const FullyShardOptions& options() const { return options_; }
  std::vector<std::string> unit_names() const;
  // Null for a name that no parameter has.
  const Flat* find(const std::string& name, const Member** member) const;
  const ShardCounts& counts() const { return counts_; }
  // None where nothing is offloaded.
  const std::shared_ptr<OffloadTiers>& tiers() const { return tiers_; }
  // The shard is about to be read.
  void before_read(const Tag& tag) const { flats_[tag.flat]->wait_updated(); }
  const GatherMemory& gather_memory() const { return *gather_memory_; }
  const GradientMemory& gradient_memory() const { return *gradient_memory_; }
  size_t current_bytes() const;
  size_t peak_bytes() const { return peak_bytes_; }

 private:
  class ArrivalHook;
  class AccumulationHook;
  struct Unit {
    std::string name;
    std::vector<Flat*> flats = {};  // those that come and go
    int pins = 0;
    bool used_in_backward = false;  // the last time
  };
  struct Hooks {
    std::shared_ptr<torch::autograd::Node> accumulator;  // the tensor itself holds it weakly
    uintptr_t arrival = 0;
  };

  void install_hooks();
  void check_replaced();
  void begin_epoch();
  void open_window();
  void outdate();
  void use(size_t unit, const std::set<size_t>& held);
  void gather(Flat& flat);
  void fetch_ahead(std::span<const size_t> units);  // the nearest first
  void stay_near();
  std::vector<size_t> ahead() const;
  void release(Unit& unit);
  void make_way();
  void announce_foreign_writes();
  bool is_kept(const Unit& unit) const { return unit.pins > 0 || summons_ > 0; }
  bool evaluates(Phase phase) const;
  void release_used();
  bool may_release(const Unit& unit, Phase phase) const;
  Prefetch prefetch_in(Phase phase) const;
  void release_all();

  bool syncs() const;
  void arrive(size_t flat, size_t member);
  void begin_round();
  void open_round(bool in_backward);
  void end_round();
  void reduce_round();
  const Member* find_unfrozen() const;
  void abandon_round();
  void launch_complete();
  void launch(Flat& flat);
  bool make_room();
  void learn_launch_order();
  void note_bytes();

  ShardGroups groups_;
  FullyShardOptions options_;
  std::weak_ptr<const torch::nn::Module> model_;
  std::shared_ptr<OffloadTiers> tiers_;  // where something is offloaded
  std::unique_ptr<GatherMemory> gather_memory_;
  std::unique_ptr<GradientMemory> gradient_memory_;
  std::vector<std::unique_ptr<Flat>> flats_;
  std::vector<Unit> units_;
  std::vector<size_t> unit_of_;  // per flat
  std::vector<std::vector<Hooks>> hooks_;
  bool one_sided_ = false;
  const Member* replaced_ = nullptr;  // perhaps

  bool window_ = true;           // shards may be written
  bool foreign_writes_ = false;  // and someone else than an offloaded model's optimizer does
  std::set<size_t> held_;        // units of the operator that runs
  int64_t backwards_ = 0;
  int summons_ = 0;
  int writers_ = 0;  // of them, those that may write
  bool drops_always_ = false;
  UnitOrder order_;
  size_t current_ = SIZE_MAX;
  std::set<size_t> evaluated_;             // units of the evaluation that runs
  std::deque<memory::Event> handed_over_;  // of an offloaded model: before its last units

  std::mutex mutex_;  // gradients of different devices arrive on different threads
  int no_sync_ = 0;
  bool last_round_ = true;              // the gradients of the step are complete with the round
  std::optional<int64_t> micro_batch_;  // whose gradients come; none: the next one's
  bool in_backward_ = false;            // the round is a backward, not reduce_now()
  bool in_round_ = false;
  bool round_syncs_ = true;
  std::weak_ptr<bool> callback_;  // gone, if the backward of the round was ended by an exception
  std::vector<std::vector<int64_t>> arrived_;  // per flat and member, since the last reduction
  std::vector<size_t> launch_order_;           // flats
  std::vector<size_t> arrival_order_;
  size_t num_launched_ = 0;
  bool late_ = false;
  bool learned_ = false;
  std::vector<Flat*> under_way_;

  ShardCounts counts_;
  size_t peak_bytes_ = 0;
  CopyThread copy_thread_;  // last: ends first
};

// Of the gradients that were updated with in backward since it was last asked for; collective.
double consumed_norm(const ShardEngine& engine);

}  // namespace lockstep::parallel::detail
