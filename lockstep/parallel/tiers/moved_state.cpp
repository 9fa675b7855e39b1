// SPDX-License-Identifier: Apache-2.0
// Optimizer state that moves to another tier for good.
#include <utility>

#include "lockstep/codec/codec.h"
#include "lockstep/core/error.h"
#include "lockstep/parallel/tiers/offloaded_state.h"

namespace lockstep::parallel::detail {

using layout::Tier;

// The slice has its new place before it gives up the old one, so that nothing is lost where memory
// or the disk refuse.
bool OffloadedState::move(Slice& slice, Tier to) {
  const Tier from = slice.place.tier;
  if (to <= from) return true;
  OffloadTiers& tiers = *tiers_;
  // As computed with, in host memory, where it stays if it is within the budget.
  std::shared_ptr<std::byte> bytes;
  bool within_budget = false;
  if (from == Tier::device && to == Tier::host && !plan_.lossless) {
    try {
      bytes = tiers.host_memory.take(slice.bytes, "optimizer state of " + name_);
      within_budget = true;
    } catch (const Error&) {  // over the budget, or over what may be pinned
      to = Tier::disk;
    }
  }
  if (to == Tier::disk && !tiers.disk) return false;
  if (from != Tier::device) {
    bytes = load(slice);
  } else {
    if (!bytes) bytes = {new std::byte[slice.bytes], std::default_delete<std::byte[]>()};
    tiers.copy_out(bytes.get(), slice.memory.get(), slice.bytes, name_);
    tiers.out->record().wait();
  }
  Slice moved{.place = slice.place, .bytes = slice.bytes, .stores = 2};
  moved.place.tier = to;
  if (plan_.lossless) {
    auto packed = codec::compress({bytes.get(), slice.bytes}, kWidth);
    if (to == Tier::host && take_host(moved, packed.size())) {
      moved.packed = std::move(packed);
    } else if (tiers.disk) {
      auto kept = std::make_shared<std::vector<std::byte>>(std::move(packed));
      moved.place.tier = Tier::disk;
      moved.block_bytes = kept->size();
      moved.block = tiers.disk->put(*kept, kept);
    } else {
      return false;
    }
  } else if (within_budget) {
    moved.memory = std::move(bytes);
  } else {
    moved.block_bytes = slice.bytes;
    moved.block = tiers.disk->put({bytes.get(), slice.bytes}, bytes);
  }
  tiers.traffic.to_disk += static_cast<int64_t>(moved.block_bytes);
  if (from == Tier::device) {
    const optim::PackedFormat plain{.param = plan_.format.param};
    tiers.kept.plain += static_cast<int64_t>(optim::packed_layout(plain, slice.place.count).total);
  } else {
    tiers.kept.bytes -= static_cast<int64_t>(kept_bytes(slice));
  }
  tiers.kept.bytes += static_cast<int64_t>(kept_bytes(moved));
  slice = std::move(moved);
  // Updates by the CPU have a copy of the parameter that is not up to date where the state was on
  // the device.
  mirror_.reset();
  return true;
}

}  // namespace lockstep::parallel::detail
