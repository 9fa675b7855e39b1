// SPDX-License-Identifier: Apache-2.0
#include "lockstep/memory/counting/thread_usage.h"

#include <atomic>
#include <deque>
#include <mutex>
#include <unordered_map>

namespace lockstep::memory {

struct ThreadUsage::Counts {
  std::atomic<int64_t> held{0}, most{0};
};

namespace {

struct CountedBlock {
  ThreadUsage::Counts* counts;
  int64_t bytes;
};

// Of the process, like the allocator: it asks by the address of a block alone. Never destroyed,
// because tensors may outlive everything, and neither are counts (16 bytes for each offloaded
// model), because any thread may still point to them.
struct CountedBlocks {
  std::mutex mutex;
  std::unordered_map<const void*, CountedBlock> blocks;
  std::deque<ThreadUsage::Counts> counts;
  std::atomic<size_t> num_blocks{0};

  static CountedBlocks& all() {
    static auto* const all = new CountedBlocks;
    return *all;
  }
};

// Of the thread: allocators are asked by operators, which pass nothing on.
thread_local ThreadUsage::Counts* active = nullptr;

}  // namespace

ThreadUsage::ThreadUsage() {
  CountedBlocks& all = CountedBlocks::all();
  const std::lock_guard lock(all.mutex);
  counts_ = &all.counts.emplace_back();
}

void ThreadUsage::enter() const { active = counts_; }
void ThreadUsage::leave() { active = nullptr; }

int64_t ThreadUsage::current() const { return counts_->held; }
int64_t ThreadUsage::peak() const { return counts_->most; }
void ThreadUsage::reset_peak() const { counts_->most = counts_->held.load(); }

void ThreadUsage::note_allocation(const void* block, size_t bytes) {
  Counts* const counts = active;
  if (counts == nullptr || block == nullptr || bytes == 0) return;
  const auto size = static_cast<int64_t>(bytes);
  CountedBlocks& all = CountedBlocks::all();
  {
    const std::lock_guard lock(all.mutex);
    all.blocks.emplace(block, CountedBlock{counts, size});
    all.num_blocks = all.blocks.size();
  }
  const int64_t now = counts->held += size;
  for (int64_t before = counts->most;
       now > before && !counts->most.compare_exchange_weak(before, now);) {
  }
}

void ThreadUsage::note_release(const void* block) {
  CountedBlocks& all = CountedBlocks::all();
  if (all.num_blocks == 0) return;
  const std::lock_guard lock(all.mutex);
  const auto found = all.blocks.find(block);
  if (found == all.blocks.end()) return;
  found->second.counts->held -= found->second.bytes;
  all.blocks.erase(found);
  all.num_blocks = all.blocks.size();
}

}  // namespace lockstep::memory
