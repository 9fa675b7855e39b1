// SPDX-License-Identifier: Apache-2.0
// How much torch's allocator for the CPU has given to some threads. Private: not installed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lockstep::memory {

// Counts the bytes that threads have asked for while they were in it, until they are released, by
// whatever thread. So thread ranks are counted apart. Only where the Meter is installed, whose
// allocator reports here. Thread safe.
class ThreadUsage {
 public:
  ThreadUsage();
  ThreadUsage(const ThreadUsage&) = delete;
  ThreadUsage& operator=(const ThreadUsage&) = delete;

  // What the calling thread allocates is counted here from now on, and nowhere else.
  void enter() const;
  // It is counted nowhere any more.
  static void leave();

  int64_t current() const;
  int64_t peak() const;  // since reset_peak()
  void reset_peak() const;

  // For the allocator.
  static void note_allocation(const void* block, size_t bytes);
  static void note_release(const void* block);

  struct Counts;

 private:
  Counts* counts_;
};

}  // namespace lockstep::memory
