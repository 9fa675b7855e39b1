// SPDX-License-Identifier: Apache-2.0
#include "lockstep/memory/meter.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <malloc.h>

#include <atomic>
#include <cstring>
#include <mutex>

#include "lockstep/core/format.h"
#include "lockstep/memory/counting/allocation_log.h"
#include "lockstep/memory/counting/thread_usage.h"

namespace lockstep::memory {
namespace {

// Of the process: what frees a tensor's memory is a plain function, which finds nothing else.
std::atomic<int64_t> held{0}, most{0}, limit{0};
c10::Allocator* below = nullptr;

int64_t size_of(void* data) {
  return data == nullptr ? 0 : static_cast<int64_t>(malloc_usable_size(data));
}

void free_counted(void* data) {
  AllocationLog::note_release(data);
  ThreadUsage::note_release(data);
  held -= size_of(data);
  below->raw_deleter()(data);
}

// The pointer that a tensor gets is the one of the allocator below, as it is: some parts of torch
// ask for that. So the size is not stored with it, but asked of malloc.
c10::DataPtr allocate_counted(size_t bytes) {
  const auto asked = static_cast<int64_t>(bytes);
  if (limit > 0 && held + asked > limit) throw OutOfMemory(asked, held, limit);
  c10::DataPtr memory = below->allocate(bytes);
  if (memory.get() == nullptr) return memory;
  const int64_t now = held += size_of(memory.get());
  for (int64_t before = most; now > before && !most.compare_exchange_weak(before, now);) {
  }
  check(memory.compare_exchange_deleter(below->raw_deleter(), &free_counted),
        "the CPU's allocator has another deleter than it says");
  AllocationLog::note_allocation(memory.get_context(), bytes);
  ThreadUsage::note_allocation(memory.get_context(), bytes);
  return memory;
}

// Without `override`: allocate() is const in libtorch 1.13 and not in later ones, which also have
// copy_data().
struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) { return allocate_counted(bytes); }
  c10::DataPtr allocate(size_t bytes) const { return allocate_counted(bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return &free_counted; }
  void copy_data(void* target, const void* source, size_t bytes) const {
    std::memcpy(target, source, bytes);
  }
};

}  // namespace

void Meter::install() {
  static std::once_flag once;
  std::call_once(once, [] {
    static auto* const counting = new CountingAllocator;  // tensors may outlive everything
    below = c10::GetCPUAllocator();
    check(below->raw_deleter() != nullptr, "the CPU's allocator has no deleter of its own");
    constexpr uint8_t kHighest = 255;
    c10::SetCPUAllocator(counting, kHighest);
  });
}

bool Meter::is_installed() { return below != nullptr; }
int64_t Meter::current() { return held; }
int64_t Meter::peak() { return most; }
void Meter::reset_peak() { most = held.load(); }
void Meter::set_limit(int64_t bytes) {
  if (bytes > 0) install();
  limit = bytes;
}

}  // namespace lockstep::memory
