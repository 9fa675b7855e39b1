#include "lockstep/parallel/shard/buffers.h"

#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>

#include <algorithm>
#include <array>

namespace lockstep::parallel::detail {
namespace {

// Two: one that is filled while the other is reduced.
constexpr size_t kBlocks = 2;

}  // namespace

std::shared_ptr<void> GatherMemory::take(size_t bytes, c10::Device device) {
  // Units of about the same size take each other's places, where first fit would leave gaps that
  // are a little too small.
  if (device.is_cpu()) return arena_.take(bytes, bytes > largest_ / 2 ? largest_ : 0);
  auto memory = std::make_shared<c10::DataPtr>(c10::GetAllocator(device.type())->allocate(bytes));
  memory::ArenaStats& stats = *counted_;
  stats.used += bytes;
  if (stats.used > stats.peak) {
    stats.peak = stats.used;
    ++stats.growths;
  }
  void* const data = memory->get();
  return {data, [memory, counted = counted_, bytes](void*) { counted->used -= bytes; }};
}

at::Tensor GradientMemory::allocate(size_t bytes) {
  occupied_ += bytes;
  ++allocations_;
  const std::array<int64_t, 1> size{static_cast<int64_t>(bytes)};
  if (device_.is_cpu()) return comm::symmetric_empty(size, DType::uint8, group_);
  return at::empty(size, at::TensorOptions().dtype(at::kByte).device(device_));
}

at::Tensor GradientMemory::keep(size_t bytes) { return allocate(bytes); }

at::Tensor GradientMemory::take(size_t bytes, const std::function<bool()>& make_room) {
  for (;;) {
    const at::Tensor* best = nullptr;
    size_t num_free = 0;
    for (const at::Tensor& block : blocks_) {
      if (block.use_count() > 1) continue;
      ++num_free;
      if (block.nbytes() >= bytes && (best == nullptr || block.nbytes() < best->nbytes()))
        best = &block;
    }
    if (best != nullptr) return *best;
    if (blocks_.size() < kBlocks) break;
    if (make_room()) continue;
    // All that is free is too small: let it go for a larger one.
    if (num_free > 0) {
      const auto unused = std::find_if(blocks_.begin(), blocks_.end(), [](const at::Tensor& block) {
        return block.use_count() == 1;
      });
      occupied_ -= unused->nbytes();
      blocks_.erase(unused);
    }
    break;
  }
  // The first ones serve all; more are needed where gradients wait for others.
  blocks_.push_back(allocate(blocks_.size() < kBlocks ? std::max(bytes, largest_) : bytes));
  return blocks_.back();
}

void GradientMemory::trim() {
  for (size_t i = blocks_.size(); i-- > kBlocks;) {
    if (blocks_[i].use_count() > 1) continue;
    occupied_ -= blocks_[i].nbytes();
    blocks_.erase(blocks_.begin() + static_cast<int64_t>(i));
  }
}

}  // namespace lockstep::parallel::detail
