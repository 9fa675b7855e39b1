// SPDX-License-Identifier: Apache-2.0
// The backward of a sharded model: when gradients arrive, when they are reduced, and how ranks stay
// together.
//
// Gradients arrive one by one, are laid into their flat's line, and full lines are reduced in an
// order that all ranks share. Private: not installed.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/parallel/flat/flat.h"
#include "lockstep/parallel/gradients/backward_rounds.h"
#include "lockstep/parallel/shard/options.h"
#include "lockstep/parallel/shard/scaling_watch.h"

namespace lockstep::parallel::detail {

// What is likely wrong where a rank waits in vain.
inline constexpr const char* kUseByAllRanks =
    "all ranks must use a sharded model equally often: give them the same number of batches, "
    "evaluate and save on all of them, and let none leave before the others (comm::barrier)";

class GradientReduction final : public BackwardRounds::Listener {
 public:
  // What else happens in a round.
  struct Events {
    std::function<void()> opens;    // before it; may throw, so that there is none
    std::function<void()> ends;     // before what is left is reduced
    std::function<void()> reduced;  // gradients are the optimizer's
    std::function<void()> memory_changed;
  };
  using Flats = std::vector<std::unique_ptr<Flat>>;
  GradientReduction(comm::Group group, const FullyShardOptions& options, const Flats& flats,
                    Events events)
      : group_(std::move(group)), options_(options), flats_(flats), events_(std::move(events)) {}

  // When all flats are there. `self`: this, owned by the owner of the flats.
  void start(FlatEnvironment& environment, std::weak_ptr<GradientReduction> self);

  void change_no_sync(int change) { no_sync_ += change; }
  bool is_under_no_sync() const { return no_sync_ > 0; }
  void set_micro_batch(std::optional<int64_t> index) { micro_batch_ = index; }
  // Reduces what backward passes under no_sync left; collective.
  void reduce_now();
  // Shards are about to be written.
  void before_step() { scaling_.before_step(); }
  // In a backward, before gradients come: the round has begun.
  void begin_backward();

 private:
  void before_gradient(size_t parameter) override;
  void on_gradient(size_t parameter, bool is_new) override;
  bool open_round(bool in_backward) override;
  void close_round() override;
  void abandon_round() override;

  void reduce_round();
  const Member* find_unfrozen() const;
  void launch_complete();
  void launch(Flat& flat);
  bool make_room();
  void learn_launch_order();

  comm::Group group_;
  const FullyShardOptions& options_;
  const Flats& flats_;
  Events events_;
  FlatEnvironment* environment_ = nullptr;
  struct Place {
    size_t flat, member;
  };
  std::vector<Place> places_;  // of the parameters that are listened to

  int no_sync_ = 0;
  std::optional<int64_t> micro_batch_;  // whose gradients come; none: the next one's
  bool in_backward_ = false;            // the round is a backward, not reduce_now()
  bool round_syncs_ = true;
  std::vector<std::vector<int64_t>> arrived_;  // per flat and member, since the last reduction
  std::vector<size_t> launch_order_;           // flats
  std::vector<size_t> arrival_order_;
  size_t num_launched_ = 0;
  bool late_ = false;
  bool learned_ = false;
  std::vector<Flat*> under_way_;
  ScalingWatch scaling_;
  BackwardRounds rounds_;
};

}  // namespace lockstep::parallel::detail
