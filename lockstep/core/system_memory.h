// How much memory this process may still take.
#pragma once

#include <cstdint>

namespace lockstep {

// Bytes that can be had without driving the machine, or the control group this process is in, out
// of memory.
uint64_t available_memory();

}  // namespace lockstep
