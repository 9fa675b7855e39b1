// SPDX-License-Identifier: Apache-2.0
#include "lockstep/schedule/simulate.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/schedule/links.h"

namespace lockstep::schedule {
namespace {

using detail::Position;

std::vector<std::vector<Interval>> run_times(const Schedule& schedule, const Cost& cost,
                                             const Hop& hop) {
  std::vector<std::vector<Interval>> times;
  for (const auto& actions : schedule.actions) times.emplace_back(actions.size());
  const detail::Links links(schedule);
  std::vector<double> free(schedule.ranks, 0);
  const auto done = detail::run(schedule, links, [&](Position at, std::optional<Position> input) {
    double start = free[at.rank];
    if (input) {
      const double ready = times[input->rank][input->index].end;
      start = std::max(start, ready + (input->rank == at.rank ? 0 : hop(input->rank, at.rank)));
    }
    free[at.rank] = start + cost(at.rank, schedule.actions[at.rank][at.index]);
    times[at.rank][at.index] = {start, free[at.rank]};
  });
  for (int rank = 0; rank < schedule.ranks; ++rank) {
    check(done[rank] == times[rank].size(), "only a valid schedule can be simulated");
  }
  return times;
}

int peak_of(const std::vector<Action>& actions) {
  int live = 0, peak = 0;
  for (const Action& action : actions) {
    if (action.op == Op::forward) peak = std::max(peak, ++live);
    if (action.op == Op::backward || action.op == Op::backward_weight) --live;
  }
  return peak;
}

}  // namespace

Cost uniform(const Costs& costs) {
  return [costs](int, const Action& action) {
    switch (action.op) {
      case Op::forward:
        return costs.forward;
      case Op::backward:
        return costs.backward.value_or(costs.input + costs.weight);
      case Op::backward_input:
        return costs.input;
      case Op::backward_weight:
        return costs.weight;
      default:
        return 0.0;
    }
  };
}

Simulation summarize(const Schedule& schedule, std::vector<std::vector<Interval>> intervals) {
  Simulation result;
  result.times = std::move(intervals);
  double busy = 0, longest = 0;
  for (int rank = 0; rank < schedule.ranks; ++rank) {
    const auto& times = result.times[rank];
    for (const auto& [start, end] : times) busy += end - start;
    result.makespan = std::max(result.makespan, times.back().end);
    result.span.push_back(times.back().end - times.front().start);
    longest = std::max(longest, result.span.back());
    result.peak_live.push_back(peak_of(schedule.actions[rank]));
  }
  const auto bubble = [&](double whole) {
    return whole > 0 ? 1 - busy / schedule.ranks / whole : 0.0;
  };
  result.bubble_makespan = bubble(result.makespan);
  result.bubble_span = bubble(longest);
  return result;
}

Simulation simulate(const Schedule& schedule, const Cost& cost, double hop) {
  return simulate(schedule, cost, [hop](int, int) { return hop; });
}

Simulation simulate(const Schedule& schedule, const Cost& cost, const Hop& hop) {
  return summarize(schedule, run_times(schedule, cost, hop));
}

}  // namespace lockstep::schedule
