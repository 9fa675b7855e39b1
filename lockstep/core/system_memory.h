// SPDX-License-Identifier: Apache-2.0
// How much memory this process may still take, and what it has made for others to see.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lockstep {

size_t page_size();
constexpr size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Bytes that can be had without driving the machine, or the control group this process is in, out
// of memory.
uint64_t available_memory();

// Bytes of symmetric memory that this process has made and written to.
uint64_t symmetric_memory();

}  // namespace lockstep
