// SPDX-License-Identifier: Apache-2.0
// Counts what torch's allocator for the CPU has given out, and can hold it to a limit.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>

#include "lockstep/core/error.h"

namespace lockstep::memory {

// There is one in a process, as there is one allocator. Thread safe.
// Ranks that are threads share it, and its limit.
class Meter {
 public:
  // Tensors that are made from now on are counted. Before other threads use torch; again does
  // nothing.
  static void install();
  static bool is_installed();

  static int64_t current();  // bytes, as malloc rounds them
  static int64_t peak();     // since reset_peak()
  static void reset_peak();
  // Installs it for a limit: allocations that would go past it throw OutOfMemory. 0: no limit.
  static void set_limit(int64_t bytes);
};

// What CUDA's allocator refused last, if limit_device() has set a limit there and it has refused
// something.
std::optional<OutOfMemory> cuda_refusal();

// Bytes that CUDA's allocator had given out at most, of all pools: since reset_cuda_peak(), and
// since the process began. 0 in builds without CUDA.
int64_t cuda_peak(c10::Device device);
int64_t highest_cuda_peak(c10::Device device);
void reset_cuda_peak(c10::Device device);
// Bytes that it may still give out: of the device or, where limit_device() has set one, the limit.
int64_t cuda_room(c10::Device device);

}  // namespace lockstep::memory
