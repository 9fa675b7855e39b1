// SPDX-License-Identifier: Apache-2.0
// A forward that is recorded once, as a CUDA graph, and then repeated without the work of the CPU.
// Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

namespace lockstep::model {

class RecordedForward {
 public:
  virtual ~RecordedForward() = default;
  // Computes again from what is now in the memory that was read. The result is always in the same
  // memory.
  virtual at::Tensor repeat() = 0;
};

// `forward` was called before, so that what it makes at first is there, and waits for nothing. It
// is recorded, not computed: repeat() does. The memory that it reads must stay where it is. Null
// where this build cannot record.
std::unique_ptr<RecordedForward> record(c10::Device device,
                                        const std::function<at::Tensor()>& forward);

}  // namespace lockstep::model
