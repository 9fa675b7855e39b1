// SPDX-License-Identifier: Apache-2.0
// How much memory a device has.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

namespace lockstep::memory {

// Bytes: all that a CUDA device has, and what this process may still take on the CPU.
int64_t device_bytes(c10::Device device);

}  // namespace lockstep::memory
