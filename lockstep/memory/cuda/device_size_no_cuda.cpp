// SPDX-License-Identifier: Apache-2.0
#include "lockstep/core/system_memory.h"
#include "lockstep/memory/device_size.h"
#include "lockstep/memory/meter.h"

namespace lockstep::memory {

int64_t device_bytes(c10::Device) { return static_cast<int64_t>(available_memory()); }
void limit_device(c10::Device, int64_t bytes) { Meter::set_limit(bytes); }
int64_t cuda_peak(c10::Device) { return 0; }
int64_t highest_cuda_peak(c10::Device) { return 0; }
void reset_cuda_peak(c10::Device) {}
int64_t cuda_room(c10::Device) { return 0; }
std::optional<OutOfMemory> cuda_refusal() { return std::nullopt; }

}  // namespace lockstep::memory
