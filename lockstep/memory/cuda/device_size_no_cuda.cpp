// SPDX-License-Identifier: Apache-2.0
#include "lockstep/core/system_memory.h"
#include "lockstep/memory/device_size.h"

namespace lockstep::memory {

int64_t device_bytes(c10::Device) { return static_cast<int64_t>(available_memory()); }

}  // namespace lockstep::memory
