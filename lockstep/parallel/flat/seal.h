// SPDX-License-Identifier: Apache-2.0
// Notices writes that no operator made: through data_ptr(), or by a kernel of the user's. Private:
// not installed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace lockstep::parallel::detail {

// Samples of host memory that must not change while it is closed. A few elements are compared, so
// a write to a part of the memory may go unnoticed; one to all of it does not.
class Seal {
 public:
  // Adds samples of `count` elements of `width` bytes that begin at `begin`, in bytes.
  void watch(size_t begin, size_t count, size_t width);
  void close(const void* memory);
  void open() { closed_ = false; }
  // Where in the memory, in bytes, a sample is not what it was when the seal was closed.
  std::optional<size_t> broken_at(const void* memory) const;

 private:
  struct Sample {
    size_t offset, width;
    uint64_t value = 0;
  };
  std::vector<Sample> samples_;
  bool closed_ = false;
};

}  // namespace lockstep::parallel::detail
