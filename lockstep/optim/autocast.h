// SPDX-License-Identifier: Apache-2.0
// torch's automatic casts, for a scope.
#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::optim {

struct AutocastOptions {
  at::DeviceType device = at::kCPU;      // or CUDA: whose operators cast
  at::ScalarType dtype = at::kBFloat16;  // or float16; on the CPU only from libtorch 2.4 on
  bool enabled = true;  // false: a part in full precision inside a scope that casts
};

// What holds on this thread now.
AutocastOptions current_autocast(at::DeviceType device);

// While it lives, operators of the device that gain from 16 bits (matrix products, convolutions)
// take their float32 inputs in that type, and those that need it (sums, losses) compute in float32.
// Holds for this thread only. Not for backward: that runs in the types of the forward by itself.
// Weights that were cast are kept until the outermost guard ends; the end restores what was before.
class AutocastGuard {
 public:
  explicit AutocastGuard(AutocastOptions options);
  ~AutocastGuard();
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;

 private:
  AutocastOptions previous_;
};

}  // namespace lockstep::optim
