// SPDX-License-Identifier: Apache-2.0
// Predicted memory for people.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "lockstep/plan/memory.h"

namespace lockstep::plan {

// "0-3, 8"; the first of many, and how many there are.
std::string rank_ranges(const std::vector<size_t>& ranks);

// A line for each kind of rank: those whose numbers differ by less than a hundredth share one, as
// "0-3, 8", which has the largest of each.
std::string to_table(std::span<const Memory> ranks);

// "offload before the first step: 1.2 GB on the host, 0 B on the disk", of the rank that has most
// there, which is named where ranks differ.
std::string offload_line(std::span<const Memory> ranks);

// The rank that takes most, by total or by state.
size_t largest_total(std::span<const Memory> ranks);
size_t largest_state(std::span<const Memory> ranks);

}  // namespace lockstep::plan
