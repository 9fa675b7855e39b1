// SPDX-License-Identifier: Apache-2.0
// Copies between ranks' memory.
#pragma once

#include <cstddef>

namespace lockstep::fabric {

// Both copy between ranges that are equal or do not overlap.

// Into memory that is read again soon, such as staging.
void copy_bytes(std::byte* to, const std::byte* from, size_t bytes);

// Into memory that is not: large copies bypass the cache where that pays.
void copy_result(std::byte* to, const std::byte* from, size_t bytes);

}  // namespace lockstep::fabric
