// SPDX-License-Identifier: Apache-2.0
// How much memory a device has, and how much of it may be taken.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

namespace lockstep::memory {

// Bytes: all that a CUDA device has, and what this process may still take on the CPU.
int64_t device_bytes(c10::Device device);

// Holds this process to so many bytes of tensors on the device: an allocation past it fails. On the
// CPU tensors that exist are not counted. 0: no limit.
void limit_device(c10::Device device, int64_t bytes);

}  // namespace lockstep::memory
