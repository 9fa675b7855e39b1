// SPDX-License-Identifier: Apache-2.0
// What of the system's memory a rank has taken, as the kernel counts it.
#pragma once

#include <cstddef>
#include <thread>

namespace lockstep::bench {

// Bytes of anonymous memory in RAM, and of the symmetric memory that this process allocated. The
// resident set is no measure of a rank: a page of a peer's memory counts there as soon as it has
// been read, so every rank that gathers a sharded model seems to hold all of it. Not counted is the
// staging memory of groups: rank 0 makes it for all, and the model does not matter for its size.
size_t own_memory();

size_t resident_memory();
// The largest resident set that the process has had.
size_t resident_peak();

// The most that own_memory() gave while this was alive, looked at every millisecond.
class PeakMemory {
 public:
  PeakMemory();
  size_t stop();

 private:
  size_t peak_ = 0;
  std::jthread thread_;
};

}  // namespace lockstep::bench
