// SPDX-License-Identifier: Apache-2.0
// What the arena of gathered parameters comes to occupy. Follows parallel/shard/engine.cpp and
// memory/arena.cpp. Private: not installed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace lockstep::plan {

// One use of a unit's line; uses of a unit have its number.
struct LineUse {
  size_t unit = 0;
  int64_t bytes = 0;
};

// Bytes, after a step whose uses come in this order: each time the line that is used and the next
// one are there.
int64_t gathered_bytes(std::span<const LineUse> uses);

}  // namespace lockstep::plan
