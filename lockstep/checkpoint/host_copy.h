// SPDX-License-Identifier: Apache-2.0
// Slices as they were at one moment, in memory of the host. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "lockstep/checkpoint/slices.h"
#include "lockstep/checkpoint/write_slices.h"
#include "lockstep/layout/box.h"

namespace lockstep::checkpoint::detail {

// Blocks of one size, pinned where slices come from a device: torch's allocator of pinned memory
// rounds sizes up to powers of two, which these are. They are kept for the next copy.
class HostCopy {
 public:
  // Memory for such slices, touched.
  void reserve(const std::vector<NamedSlice>& slices);
  // Returns when all bytes are here.
  void take(const std::vector<NamedSlice>& slices);

  // Of the slice of this number.
  void bytes(size_t slice, const Sink& sink) const;

 private:
  void find_places(const std::vector<NamedSlice>& slices);

  std::vector<at::Tensor> blocks_;
  std::vector<layout::Range> places_;  // of each slice, counted over all blocks
};

}  // namespace lockstep::checkpoint::detail
