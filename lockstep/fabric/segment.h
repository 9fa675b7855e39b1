// SPDX-License-Identifier: Apache-2.0
// A stretch of shared memory without a name: a sealed memfd that other processes open through its
// owner's /proc entry.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "lockstep/core/fd.h"

namespace lockstep::fabric {

// Enough to find a segment from another process of the same user. The inode tells a reused
// descriptor from the real one.
struct SegmentHandle {
  int64_t pid = 0;
  int64_t fd = -1;
  uint64_t inode = 0;
  uint64_t bytes = 0;

  std::string to_text() const;
  static SegmentHandle from_text(const std::string& text);
};

class Segment {
 public:
  Segment() = default;
  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  ~Segment();

  // Zeroed memory that is really there: throws when it cannot be allocated in full, so touching it
  // never faults.
  static Segment create(size_t bytes, const char* name);
  // Addresses without memory, which commit() gives to a part of them.
  static Segment reserve(size_t bytes, const char* name);
  // Memory of this process alone, for ranks that are threads.
  static Segment create_private(size_t bytes);
  static Segment open(const SegmentHandle& handle);

  // For segments of create() and reserve(). Zeroed memory for all pages of [offset, offset + bytes)
  // that have none yet; throws as create() does.
  void commit(size_t offset, size_t bytes) const;
  // Makes [offset, offset + bytes) zero again, and gives its whole pages back to the system.
  void discard(size_t offset, size_t bytes) const;

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  const SegmentHandle& handle() const { return handle_; }  // of create() and reserve()

 private:
  void map(int fd, size_t bytes, int flags);

  std::byte* data_ = nullptr;
  size_t size_ = 0;
  Fd fd_;
  SegmentHandle handle_;
};

}  // namespace lockstep::fabric
