// SPDX-License-Identifier: Apache-2.0
// What a step has of the device in addition to what Lockstep manages there: activations,
// temporaries. Private: not installed.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>

#include "lockstep/memory/counting/thread_usage.h"

namespace lockstep::parallel::detail {

// On CUDA torch's allocator counts, and has Lockstep's memory too. On the CPU, whose tensors are
// not all "on the device", those count that the threads which compute have made between the first
// use of a parameter and the optimizer's step.
class ActivationPeak {
 public:
  explicit ActivationPeak(c10::Device device);

  // By a thread that computes, before it uses a parameter.
  void resume();
  // By the optimizer's step: what is allocated up to the next use of a parameter is not a step's.
  static void pause() { memory::ThreadUsage::leave(); }

  // The most since reset(), in bytes, where `managed` bytes of torch's memory on CUDA are
  // Lockstep's.
  int64_t bytes(int64_t managed) const;
  void reset();

 private:
  c10::Device device_;
  std::optional<memory::ThreadUsage> threads_;  // on the CPU
  bool begun_ = false;
};

}  // namespace lockstep::parallel::detail
