// SPDX-License-Identifier: Apache-2.0
// What each computation waits for, and running them in an order that gives each its input.
// Private: not installed.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

#include "lockstep/schedule/schedule.h"

namespace lockstep::schedule::detail {

struct Position {
  int rank = 0;
  size_t index = 0;  // into the rank's actions
};

// Finds actions by stage and micro-batch. The schedule must have each action once.
class Links {
 public:
  explicit Links(const Schedule& schedule);

  // The computation of the stage before (of a forward) or behind (of a backward) that makes the
  // input; none at the ends of the pipeline and for weight gradients. Forward and backward on the
  // same stage are ordered by the rank itself.
  std::optional<Position> input(Position at) const;

 private:
  size_t slot(int stage, int microbatch) const;

  const Schedule& schedule_;
  std::vector<size_t> forward_, backward_;  // index on the stage's rank, by slot
};

// Visits actions, each behind its input, until all are visited or the rest wait for each other.
// Returns how many of each rank's were visited.
std::vector<size_t> run(
    const Schedule& schedule, const Links& links,
    const std::function<void(Position at, std::optional<Position> input)>& visit);

}  // namespace lockstep::schedule::detail
