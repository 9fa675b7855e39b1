// SPDX-License-Identifier: Apache-2.0
// How long a schedule takes and what it holds, without running it.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "lockstep/schedule/schedule.h"

namespace lockstep::schedule {

using Cost = std::function<double(int rank, const Action& action)>;

// Of one micro-batch on one chunk, in any unit of time.
struct Costs {
  double forward = 1, input = 1, weight = 1;
  std::optional<double> backward = std::nullopt;  // not set: input + weight
};

// The same on every rank and chunk.
Cost uniform(const Costs& costs);

struct Interval {
  double start = 0, end = 0;

  bool operator==(const Interval&) const = default;
};

// A rank's span is from its first start to its last end. Of the time that all ranks have, the
// bubble is the part in which none of their actions runs: of the makespan, which counts where ranks
// meet at the end of a step, or of the longest span, which counts where they do not.
// A micro-batch on a chunk is live from its forward to the backward, or weight gradient, that frees
// its activations.
struct Simulation {
  double makespan = 0;
  std::vector<double> span = {};  // of each rank
  double bubble_makespan = 0, bubble_span = 0;
  std::vector<int> peak_live = {};                // of each rank, in chunks
  std::vector<std::vector<Interval>> times = {};  // parallel to the schedule's actions
};

// The numbers of actions that ran at these times, simulated or measured; the first starts at 0.
Simulation summarize(const Schedule& schedule, std::vector<std::vector<Interval>> times);

// Time from one rank to another.
using Hop = std::function<double(int from, int to)>;

// Every action starts as soon as its rank is free and its input is there; `hop` is the time from
// one rank to another, the same for all pairs in the first form. The schedule must be valid.
Simulation simulate(const Schedule& schedule, const Cost& cost, double hop = 0);
Simulation simulate(const Schedule& schedule, const Cost& cost, const Hop& hop);

}  // namespace lockstep::schedule
