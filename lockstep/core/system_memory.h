// How much memory this process may still take, and what it has made for others to see.
#pragma once

#include <cstdint>

namespace lockstep {

// Bytes that can be had without driving the machine, or the control group this process is in, out
// of memory.
uint64_t available_memory();

// Bytes of symmetric memory that this process has made and written to.
uint64_t symmetric_memory();

}  // namespace lockstep
