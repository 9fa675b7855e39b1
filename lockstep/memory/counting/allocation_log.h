// SPDX-License-Identifier: Apache-2.0
// What torch's allocators give to one thread and get back from it, in order. Private: not
// installed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

#include "lockstep/core/torch_fwd.h"

namespace lockstep::memory {

struct AllocationEvent {
  size_t block = 0;   // blocks are numbered as they are allocated
  int64_t bytes = 0;  // that were asked for; 0: the block is released

  bool operator==(const AllocationEvent&) const = default;
};

// While it lives, notes the allocations of its thread on the CPU and on the meta device, and the
// releases of what it has noted. Those of other threads are not seen. One at a time on a thread.
// What the CPU gives is seen only where the Meter is installed.
class AllocationLog {
 public:
  AllocationLog();
  ~AllocationLog();
  AllocationLog(const AllocationLog&) = delete;
  AllocationLog& operator=(const AllocationLog&) = delete;

  const std::vector<AllocationEvent>& events() const { return events_; }
  size_t size() const { return events_.size(); }
  // The block that has the tensor's memory; none: it was allocated by others, or has no bytes.
  std::optional<size_t> block_of(const at::Tensor& tensor) const;

  // For allocators: `context` is what identifies the block when it is released.
  static void note_allocation(const void* context, size_t bytes);
  static void note_release(const void* context);

 private:
  std::vector<AllocationEvent> events_;
  std::unordered_map<const void*, size_t> blocks_;  // that are in use
  size_t num_blocks_ = 0;
};

}  // namespace lockstep::memory
