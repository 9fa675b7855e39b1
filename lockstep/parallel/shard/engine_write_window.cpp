// SPDX-License-Identifier: Apache-2.0
// When shards may be written, and how ranks agree that they are.
//
// The window is open from the end of a backward, or from begin_update(), to the next use of a
// parameter. It opens only after every rank has ended its reads of other ranks' shards, and closes
// with a barrier after which all may read again. Whatever writes shards does it in the window, or
// is refused by the parameter's name: the optimizer, load(), a user's operators. summon() to write
// is a window of its own, in which the gathered copies are written and no shard is read.
#include <algorithm>

#include "lockstep/comm/collectives.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/trace.h"
#include "lockstep/parallel/shard/engine.h"
#include "lockstep/parallel/tiers/tiers.h"

namespace lockstep::parallel::detail {

// The first use since shards could be written: all ranks show what they have.
void ShardEngine::begin_epoch() {
  const trace::Span span("shard", "new parameters");
  for (const auto& flat : flats_) flat->check_members();
  for (const auto& flat : flats_) {
    flat->make_stale();
    flat->publish();
  }
  if (one_sided_) {
    comm::barrier(groups_.shard, {.tag = format("parameters after backward {}", backwards_)})
        .wait();
  }
  foreign_writes_ = false;
  window_ = false;  // not if a peer is missing: the next use finds that out again
  for (const auto& flat : flats_) {
    flat->seal();
    if (flat->plan().resident) flat->prefetch();
  }
  for (Unit& unit : units_) {
    if (!is_kept(unit)) continue;
    for (Flat* flat : unit.flats) gather(*flat);
  }
}

// No rank reads another's shard when this is called. What is being summoned to be written is
// written back when the summon ends.
void ShardEngine::open_window() {
  if (writers_ > 0) return;
  for (const auto& flat : flats_) flat->check_sealed();
  for (const auto& flat : flats_) flat->unseal();
  window_ = true;
}

// Memory that was gathered before the write is not to be read any more. What unshard() keeps, which
// is for operators, is gathered again by the next one.
void ShardEngine::outdate() {
  for (const auto& flat : flats_) flat->outdate();
  for (Unit& unit : units_) {
    if (unit.pins == 0) release(unit);
  }
}

void ShardEngine::announce_foreign_writes() {
  if (std::exchange(foreign_writes_, true)) return;
  outdate();
  if (tiers_ && tiers_->updater) tiers_->updater->before_foreign_writes();
}

// Others' writes up to here are in what the step begins from; those after it are new ones.
void ShardEngine::before_step() {
  outdate();
  foreign_writes_ = false;
}

void ShardEngine::before_write(const Tag& tag, const at::Tensor& view) {
  if (writers_ > 0) {
    throw Error(
        format("[fully_shard] the shard of parameter {} is written under a summon with "
               "write_back, whose end writes all shards; write the parameter itself, or the shard "
               "after the summon",
               tag.name_of(view)));
  }
  if (window_) return announce_foreign_writes();
  throw Error(
      format("[fully_shard] the shard of parameter {} is written, but parameters have been used "
             "since the last backward; step between a backward and the next forward, or call "
             "begin_update() on all ranks first",
             tag.name_of(view)));
}

void ShardEngine::begin_update() {
  if (writers_ > 0) {
    throw Error(
        "[fully_shard] shards are to be written (begin_update(), load) under a summon with "
        "write_back, whose end writes all shards; end the summon first");
  }
  release_all();
  announce_foreign_writes();
  if (groups_.shard.size() > 1) comm::barrier(groups_.shard, {.tag = "begin_update"}).wait();
  order_.end_pass();
  current_ = SIZE_MAX;
  open_window();
}

void ShardEngine::begin_summon(bool writes) {
  if (window_) begin_epoch();
  ++summons_;
  try {
    for (const auto& flat : flats_) gather(*flat);
    if (writes && writers_ == 0) {
      for (const auto& flat : flats_) flat->check_sealed();
      // A rank that is ahead overwrites its shard only after all have read it.
      if (groups_.shard.size() > 1) comm::barrier(groups_.shard, {.tag = "summon to write"}).wait();
      if (tiers_ && tiers_->updater) tiers_->updater->before_foreign_writes();
    }
  } catch (...) {
    --summons_;
    throw;
  }
  if (writes) ++writers_;
}

void ShardEngine::end_summon(bool writes) {
  --summons_;
  if (writes && --writers_ == 0) {
    for (const auto& flat : flats_) {
      flat->unseal();
      flat->write_back();
    }
    open_window();
  }
  for (Unit& unit : units_) {
    if (!is_kept(unit)) release(unit);
  }
}

}  // namespace lockstep::parallel::detail
