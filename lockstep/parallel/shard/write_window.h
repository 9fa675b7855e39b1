// SPDX-License-Identifier: Apache-2.0
// When shards may be written, and how ranks agree that they are.
//
// The window is open from the end of a backward, or from begin_update(), to the next use of a
// parameter. It opens only after every rank has ended its reads of other ranks' shards, and closes
// with a barrier after which all may read again. Whatever writes shards does it in the window, or
// is refused by the parameter's name: the optimizer, load(), a user's operators. summon() to write
// is a window of its own, in which the gathered copies are written and no shard is read. Private:
// not installed.
#pragma once

#include <memory>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/parallel/flat/flat.h"
#include "lockstep/parallel/shard/unit_fetcher.h"

namespace lockstep::parallel::detail {

class WriteWindow {
 public:
  using Flats = std::vector<std::unique_ptr<Flat>>;
  // `group`: ranks that share parameters out.
  WriteWindow(comm::Group group, const Flats& flats, UnitFetcher& units)
      : group_(std::move(group)), flats_(flats), units_(units) {}
  WriteWindow(const WriteWindow&) = delete;
  WriteWindow& operator=(const WriteWindow&) = delete;

  // When all flats are there. `tiers`: where something is offloaded.
  void start(const FlatEnvironment& environment, std::shared_ptr<OffloadTiers> tiers) {
    environment_ = &environment;
    tiers_ = std::move(tiers);
  }

  // Parameters are about to be used: where shards may have been written, all ranks show what they
  // have. Collective then, where shards are read without the help of their ranks.
  void close_before_use();
  // A backward is over; no rank reads another's shard when this is called.
  void open_after_backward();

  // A shard is about to be written by an operator. Throws Error where it may not.
  void before_write(const Tag& tag, const at::Tensor& view);
  // An offloaded model's optimizer, which writes past operators. False: it may not step now.
  [[nodiscard]] bool begin_step();
  // Shards may be written after this; collective.
  void begin_update();

  // Brings and keeps everything until end_summon(). To write, collective: when it returns, no rank
  // reads another's shard, and none does before the next use after end_summon(), which writes this
  // rank's part back.
  void begin_summon(bool writes);
  void end_summon(bool writes);
  // A summon to write is on.
  bool is_summoned_to_write() const { return writers_ > 0; }

 private:
  void open();
  void outdate();
  void announce_foreign_writes();

  comm::Group group_;
  const Flats& flats_;
  UnitFetcher& units_;
  const FlatEnvironment* environment_ = nullptr;
  std::shared_ptr<OffloadTiers> tiers_;  // where something is offloaded
  bool open_ = true;                     // shards may be written
  bool foreign_writes_ = false;  // and someone else than an offloaded model's optimizer does
  int writers_ = 0;              // summons to write
  int64_t backwards_ = 0;
};

}  // namespace lockstep::parallel::detail
