// Copies between ranks' memory.
#pragma once

#include <cstddef>

namespace lockstep::fabric {

// Copies where the ranges are equal or do not overlap. Large copies bypass the cache where that pays.
void copy_bytes(std::byte* to, const std::byte* from, size_t bytes);

}  // namespace lockstep::fabric
