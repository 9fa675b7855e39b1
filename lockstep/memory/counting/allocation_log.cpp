// SPDX-License-Identifier: Apache-2.0
#include "lockstep/memory/counting/allocation_log.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <mutex>

#include "lockstep/core/error.h"

namespace lockstep::memory {
namespace {

// Of the thread: allocators are asked by operators, which pass nothing on.
thread_local AllocationLog* active_log = nullptr;

void release_meta(void* block) {
  AllocationLog::note_release(block);
  delete static_cast<char*>(block);
}

// Tensors of the meta device have no memory. Theirs is a null pointer whose context, one byte,
// shows how long it is in use.
c10::DataPtr allocate_meta(size_t bytes) {
  char* const block = new char;
  AllocationLog::note_allocation(block, bytes);
  return {nullptr, block, &release_meta, c10::Device(c10::kMeta)};
}

// Without `override`, as CountingAllocator in meter.cpp.
struct MetaAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) { return allocate_meta(bytes); }
  c10::DataPtr allocate(size_t bytes) const { return allocate_meta(bytes); }
  void copy_data(void*, const void*, size_t) const {}
};

void install_meta_allocator() {
  static std::once_flag once;
  std::call_once(once, [] {
    static auto* const counting = new MetaAllocator;  // tensors may outlive everything
    constexpr uint8_t kHighest = 255;
    c10::SetAllocator(c10::kMeta, counting, kHighest);
  });
}

}  // namespace

AllocationLog::AllocationLog() {
  check(active_log == nullptr, "a thread has one AllocationLog at a time");
  install_meta_allocator();
  active_log = this;
}

AllocationLog::~AllocationLog() { active_log = nullptr; }

std::optional<size_t> AllocationLog::block_of(const at::Tensor& tensor) const {
  if (!tensor.has_storage()) return std::nullopt;
  const auto found = blocks_.find(tensor.storage().data_ptr().get_context());
  return found == blocks_.end() ? std::nullopt : std::optional(found->second);
}

void AllocationLog::note_allocation(const void* context, size_t bytes) {
  AllocationLog* const log = active_log;
  if (log == nullptr || context == nullptr || bytes == 0) return;
  log->blocks_[context] = log->num_blocks_;
  log->events_.push_back({log->num_blocks_++, static_cast<int64_t>(bytes)});
}

void AllocationLog::note_release(const void* context) {
  AllocationLog* const log = active_log;
  if (log == nullptr) return;
  const auto found = log->blocks_.find(context);
  if (found == log->blocks_.end()) return;
  log->events_.push_back({found->second, 0});
  log->blocks_.erase(found);
}

}  // namespace lockstep::memory
