// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/tiers/packed_values.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "lockstep/codec/codec.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/log.h"
#include "lockstep/core/size_text.h"
#include "lockstep/layout/offload_plan.h"
#include "lockstep/memory/arena.h"
#include "lockstep/memory/host_memory.h"

namespace lockstep::parallel::detail {
namespace {

constexpr int64_t kPack = layout::kPackedElements;

uint64_t entry(const std::byte* table, int64_t pack) {
  uint64_t end;
  std::memcpy(&end, table + static_cast<size_t>(pack) * sizeof end, sizeof end);
  return end;
}

}  // namespace

int64_t PackedView::num_packs() const { return (count + kPack - 1) / kPack; }

void PackedView::read(int64_t pack, at::ScalarType as, std::byte* to) const {
  const size_t width = c10::elementSize(dtype);
  const auto most = static_cast<uint64_t>(layout::packed_values_bound(count, width));
  const uint64_t table = static_cast<uint64_t>(num_packs()) * sizeof(uint64_t);
  const uint64_t begin = pack == 0 ? table : entry(memory, pack - 1), end = entry(memory, pack);
  if (begin < table || end < begin || end > most) {
    throw Error(
        format("[decompress] the table of compressed values is damaged: bytes {} to {} of {}",
               begin, end, most));
  }
  const int64_t elements = std::min(kPack, count - pack * kPack);
  const std::span packed(memory + begin, static_cast<size_t>(end - begin));
  const auto bytes = static_cast<size_t>(elements) * width;
  if (as == dtype) return codec::decompress(packed, {to, bytes});
  const at::Tensor plain = at::empty({elements}, dtype);
  codec::decompress(packed, {static_cast<std::byte*>(plain.data_ptr()), bytes});
  at::from_blob(to, {elements}, as).copy_(plain);
}

void PackedView::read_all(at::ScalarType as, std::byte* to) const {
  const size_t stride = static_cast<size_t>(kPack) * c10::elementSize(as);
  for (int64_t pack = 0; pack < num_packs(); ++pack)
    read(pack, as, to + static_cast<size_t>(pack) * stride);
}

int64_t PackedValues::memory_size(int64_t count, at::ScalarType dtype) {
  if (count == 0) return 0;
  const auto bound = layout::packed_values_bound(count, c10::elementSize(dtype));
  return static_cast<int64_t>(memory::HostMemory::rounded(static_cast<size_t>(bound)));
}

PackedValues::PackedValues(at::Tensor memory, int64_t count, at::ScalarType dtype,
                           OffloadTiers& tiers, std::string what)
    : memory_(std::move(memory)),
      count_(count),
      dtype_(dtype),
      tiers_(tiers),
      what_(std::move(what)) {
  check(memory_.numel() == memory_size(count, dtype), "packed values have the memory they need");
}

PackedView PackedValues::view() const {
  return {static_cast<const std::byte*>(memory_.data_ptr()), count_, dtype_};
}

void PackedValues::write(const std::byte* values) {
  if (count_ == 0) return;
  const size_t width = c10::elementSize(dtype_);
  auto* const memory = static_cast<std::byte*>(memory_.data_ptr());
  const int64_t packs = view().num_packs();
  uint64_t end = static_cast<uint64_t>(packs) * sizeof end;
  for (int64_t pack = 0; pack < packs; ++pack) {
    const int64_t begin = pack * kPack;
    const auto packed =
        codec::compress({values + static_cast<size_t>(begin) * width,
                         static_cast<size_t>(std::min(kPack, count_ - begin)) * width},
                        width);
    std::memcpy(memory + end, packed.data(), packed.size());
    end += packed.size();
    std::memcpy(memory + static_cast<size_t>(pack) * sizeof end, &end, sizeof end);
  }
  memory::give_back_pages({memory + end, memory_.nbytes() - end});
  // In the middle of a run values may compress worse than before. They cannot be anywhere else:
  // optimizer state gives way to them.
  const size_t used = memory::HostMemory::rounded(end);
  const memory::Budget& budget = tiers_.host_budget;
  share_ = {};
  if (!budget.fits(used) && !tiers_.exceeded.exchange(true)) {
    log::warn(format("[{}] {} have grown to {}, compressed, where others have {} of {}: {}",
                     budget.name(), what_, size_text(used), size_text(budget.used()),
                     size_text(budget.limit()),
                     tiers_.disk ? "optimizer state goes to the disk for them"
                                 : "the budget is exceeded, name a folder in offload.disk"));
  }
  share_ = budget.take_over(used);
  bytes_ = used;
}

}  // namespace lockstep::parallel::detail
