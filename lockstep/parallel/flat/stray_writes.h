// SPDX-License-Identifier: Apache-2.0
// Notices writes that no operator made: through data_ptr(), or by a kernel of the user's. Private:
// not installed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace lockstep::parallel::detail {

// Samples of host memory that must not change while it is watched. A few elements are compared, so
// a write to a part of the memory may go unnoticed; one to all of it does not.
class StrayWrites {
 public:
  // Adds samples of `count` elements of `width` bytes that begin `begin` bytes into `memory`.
  void add(const void* memory, size_t begin, size_t count, size_t width);
  // On: remembers the samples, and compares from here on.
  void watch(bool on);
  // Where in the memory, in bytes, a sample is not what it was when watching began.
  std::optional<size_t> find() const;

 private:
  struct Sample {
    const std::byte* memory;
    size_t offset, width;
    uint64_t value = 0;
  };
  static uint64_t value_of(const Sample& sample);

  std::vector<Sample> samples_;
  bool watches_ = false;
};

}  // namespace lockstep::parallel::detail
