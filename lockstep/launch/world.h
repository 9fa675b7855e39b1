// SPDX-License-Identifier: Apache-2.0
// The ranks of one start of a job, as one of its nodes sees them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lockstep/core/clock.h"

namespace lockstep::launch {

struct World {
  int generation = 0;             // the number of starts before this one
  int size = 1;                   // ranks of all nodes
  int first_rank = 0;             // of this node
  int nodes = 1, node = 0;        // that have ranks, and which of them this one is
  std::vector<int> places = {0};  // of this node, in the order of their local ranks
  // When the ranks are asked to stop, so that more are started.
  std::optional<Clock::time_point> grows_at = std::nullopt;
  int attempts_skipped = 0;  // whose log folders this node has of earlier jobs
  std::string layout = {};   // in words; empty: not known here
  std::string lost = {};     // "rank 2": since the start before
  std::string change = {};   // since the start before, as kChangeVariable says; empty: none

  int ranks() const { return static_cast<int>(places.size()); }
};

}  // namespace lockstep::launch
