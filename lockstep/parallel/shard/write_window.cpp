// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/shard/write_window.h"

#include "lockstep/comm/collectives.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/trace.h"

namespace lockstep::parallel::detail {

void WriteWindow::close_before_use() {
  if (!open_) return;
  const trace::Span span("shard", "new parameters");
  for (const auto& flat : flats_) flat->parameter.check_views();
  for (const auto& flat : flats_) flat->residence->publish();
  for (const auto& flat : flats_) {
    if (flat->offloaded != nullptr) flat->offloaded->settle();
  }
  if (environment_->one_sided) {
    comm::barrier(group_, {.tag = format("parameters after backward {}", backwards_)}).wait();
  }
  foreign_writes_ = false;
  open_ = false;  // not if a peer is missing: the next use finds that out again
  for (const auto& flat : flats_) flat->shard.allow_writes(false);
  units_.refresh_kept();
}

// What is being summoned to be written is written back when the summon ends.
void WriteWindow::open() {
  if (writers_ > 0) return;
  for (const auto& flat : flats_) flat->shard.check_writes();
  for (const auto& flat : flats_) flat->shard.allow_writes(true);
  open_ = true;
}

void WriteWindow::open_after_backward() {
  open();
  ++backwards_;
}

// Memory that was gathered before the write is not to be read any more. What unshard() keeps, which
// is for operators, is gathered again by the next one.
void WriteWindow::outdate() {
  for (const auto& flat : flats_) flat->parameter.outdate();
  units_.release_unpinned();
}

void WriteWindow::announce_foreign_writes() {
  if (std::exchange(foreign_writes_, true)) return;
  outdate();
  if (tiers_) tiers_->announce_foreign_writes();
}

// Others' writes up to here are in what the step begins from; those after it are new ones.
bool WriteWindow::begin_step() {
  if (!open_) return false;
  outdate();
  foreign_writes_ = false;
  return true;
}

void WriteWindow::before_write(const Tag& tag, const at::Tensor& view) {
  if (writers_ > 0) {
    throw Error(
        format("[fully_shard] the shard of parameter {} is written under a summon with "
               "write_back, whose end writes all shards; write the parameter itself, or the shard "
               "after the summon",
               tag.name_of(view)));
  }
  if (open_) return announce_foreign_writes();
  throw Error(
      format("[fully_shard] the shard of parameter {} is written, but parameters have been used "
             "since the last backward; step between a backward and the next forward, or call "
             "begin_update() on all ranks first",
             tag.name_of(view)));
}

void WriteWindow::begin_update() {
  if (writers_ > 0) {
    throw Error(
        "[fully_shard] shards are to be written (begin_update(), load) under a summon with "
        "write_back, whose end writes all shards; end the summon first");
  }
  units_.end_pass();
  announce_foreign_writes();
  if (group_.size() > 1) comm::barrier(group_, {.tag = "begin_update"}).wait();
  open();
}

void WriteWindow::begin_summon(bool writes) {
  close_before_use();
  units_.hold_all();
  if (writes && writers_ == 0) {
    try {
      for (const auto& flat : flats_) flat->shard.check_writes();
      // A rank that is ahead overwrites its shard only after all have read it.
      if (group_.size() > 1) comm::barrier(group_, {.tag = "summon to write"}).wait();
      if (tiers_) tiers_->announce_foreign_writes();
    } catch (...) {
      units_.unhold_all();
      throw;
    }
  }
  if (writes) ++writers_;
}

void WriteWindow::end_summon(bool writes) {
  if (writes && --writers_ == 0) {
    for (const auto& flat : flats_) {
      flat->shard.allow_writes(true);
      flat->shard.adopt_shown();
    }
    open();
  }
  units_.unhold_all();
}

}  // namespace lockstep::parallel::detail
