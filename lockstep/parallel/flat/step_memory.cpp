// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/flat/step_memory.h"

#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>

#include <algorithm>
#include <array>

namespace lockstep::parallel::detail {
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
  const bool shared = device_.is_cpu() && group_.size() > 1;
  if (tiers_ && !shared) return tiers_->on_device(size[0], at::kByte, "gradients");
  if (tiers_) shares_.push_back(tiers_->device_budget.take(bytes, "gradients"));
  return comm::symmetric_empty(size, DType::uint8, group_, device_);
}

at::Tensor GradientMemory::keep(size_t bytes) { return allocate(bytes); }

at::Tensor GradientMemory::take(size_t bytes, const std::function<bool()>& make_room) {
  for (;;) {
    Block* best = nullptr;
    size_t num_free = 0;
    for (Block& block : blocks_) {
      if (block.memory.use_count() > 1) continue;
      ++num_free;
      if (block.memory.nbytes() >= bytes &&
          (best == nullptr || block.memory.nbytes() < best->memory.nbytes() ||
           (block.memory.nbytes() == best->memory.nbytes() && block.since < best->since))) {
        best = &block;
      }
    }
    if (best != nullptr) {
      memory::compute_after(std::exchange(best->busy, {}), device_);
      return best->memory;
    }
    if (blocks_.size() < num_blocks(tiers_.get())) break;
    if (make_room()) continue;
    // All that is free is too small: let it go for a larger one.
    if (num_free > 0) {
      const auto unused = std::find_if(blocks_.begin(), blocks_.end(), [](const Block& block) {
        return block.memory.use_count() == 1;
      });
      unused->busy.wait();
      occupied_ -= unused->memory.nbytes();
      blocks_.erase(unused);
    }
    break;
  }
  // The first ones serve all; more are needed where gradients wait for others.
  blocks_.push_back(
      {allocate(blocks_.size() < num_blocks(tiers_.get()) ? std::max(bytes, largest_) : bytes)});
  return blocks_.back().memory;
}

void GradientMemory::reserve() {
  while (largest_ > 0 && blocks_.size() < num_blocks(tiers_.get()))
    blocks_.push_back({allocate(largest_)});
}

void GradientMemory::busy_until(const at::Tensor& memory, const memory::Event& event) {
  for (Block& block : blocks_) {
    if (!block.memory.is_same(memory)) continue;
    block.busy = event;
    block.since = ++returns_;
  }
}

void GradientMemory::trim() {
  for (size_t i = blocks_.size(); i-- > num_blocks(tiers_.get());) {
    if (blocks_[i].memory.use_count() > 1) continue;
    blocks_[i].busy.wait();
    occupied_ -= blocks_[i].memory.nbytes();
    blocks_.erase(blocks_.begin() + static_cast<int64_t>(i));
  }
}

}  // namespace lockstep::parallel::detail
