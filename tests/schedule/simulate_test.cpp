// SPDX-License-Identifier: Apache-2.0
#include "lockstep/schedule/simulate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/schedule/tables.h"

namespace lockstep::schedule {
namespace {

using ::testing::ElementsAreArray;

struct Row {
  ScheduleOptions options;
  double makespan, span, bubble_span, bubble_makespan;
  std::vector<int> peak;
};

TEST(Simulate, KnownResults) {
  const auto falling = [](int from, int to, int step) {
    std::vector<int> values;
    for (int value = from; value >= to; value -= step) values.push_back(value);
    return values;
  };
  const std::vector<Row> rows = {
      {{Kind::gpipe, 4, 8}, 33, 33, 0.272727, 0.272727, {8, 8, 8, 8}},
      {{Kind::one_f_one_b, 4, 8}, 33, 33, 0.272727, 0.272727, {4, 3, 2, 1}},
      {{Kind::interleaved, 4, 8, 2}, 57, 57, 0.157895, 0.157895, {11, 9, 7, 5}},
      {{Kind::interleaved, 4, 4, 2}, 33, 33, 0.272727, 0.272727, {8, 8, 7, 5}},
      {{Kind::interleaved, 4, 8, 4}, 105, 105, 0.085714, 0.085714, {19, 17, 15, 13}},
      {{Kind::interleaved, 4, 10, 2, 5}, 69, 69, 0.130435, 0.130435, {12, 10, 8, 6}},
      {{Kind::zb_h1, 4, 8}, 27, 27, 0.111111, 0.111111, {4, 4, 4, 4}},
      {{Kind::zb_h2, 4, 8}, 27, 24, 0, 0.111111, {7, 7, 7, 7}},
      {{Kind::zb_v, 4, 8, 2}, 51, 48, 0, 0.058824, {8, 8, 8, 8}},
      {{Kind::one_f_one_b, 8, 24}, 93, 93, 0.225806, 0.225806, falling(8, 1, 1)},
      {{Kind::interleaved, 8, 24, 3}, 237, 237, 0.088608, 0.088608, falling(31, 17, 2)},
      {{Kind::zb_h1, 8, 24}, 79, 79, 0.088608, 0.088608, std::vector<int>(8, 8)},
      {{Kind::zb_h2, 8, 24}, 79, 72, 0, 0.088608, std::vector<int>(8, 15)},
      {{Kind::zb_v, 8, 24, 2}, 151, 144, 0, 0.046358, std::vector<int>(8, 16)},
  };
  for (const auto& [options, makespan, span, bubble_span, bubble_makespan, peak] : rows) {
    SCOPED_TRACE(layout::name_of(options.kind));
    const Simulation simulation = simulate(generate(options), uniform({}));
    EXPECT_DOUBLE_EQ(simulation.makespan, makespan);
    EXPECT_DOUBLE_EQ(*std::max_element(simulation.span.begin(), simulation.span.end()), span);
    EXPECT_NEAR(simulation.bubble_span, bubble_span, 5e-7);
    EXPECT_NEAR(simulation.bubble_makespan, bubble_makespan, 5e-7);
    EXPECT_THAT(simulation.peak_live, ElementsAreArray(peak));
  }
}

// Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241): bubble rates of four models,
// from the times in milliseconds that were profiled of a forward, the two halves of a backward, and
// a message. The rates count the longest span of a rank.
TEST(Simulate, PublishedZeroBubbleRates) {
  struct Profile {
    int ranks, microbatches;
    Costs costs;
    double hop, one_f_one_b, zb_h1, zb_h2;
  };
  const std::vector<Profile> profiles = {
      {8, 24, {18.522, 18.086, 9.337}, 0.601, 0.2431, 0.1585, 0.1083},
      {8, 24, {29.718, 29.444, 19.927}, 0.527, 0.2347, 0.1323, 0.0698},
      {16, 48, {11.347, 11.248, 8.132}, 0.377, 0.2552, 0.1397, 0.0672},
      {32, 96, {10.419, 10.207, 7.715}, 0.408, 0.2646, 0.1421, 0.0641},
  };
  for (const Profile& profile : profiles) {
    const auto rate = [&](Kind kind) {
      return simulate(generate({kind, profile.ranks, profile.microbatches}), uniform(profile.costs),
                      profile.hop)
          .bubble_span;
    };
    EXPECT_NEAR(rate(Kind::one_f_one_b), profile.one_f_one_b, 1e-4) << profile.ranks;
    EXPECT_NEAR(rate(Kind::zb_h1), profile.zb_h1, 1e-4) << profile.ranks;
    EXPECT_NEAR(rate(Kind::zb_h2), profile.zb_h2, 1e-4) << profile.ranks;
  }
}

// Ranks 0 and 1 are close, 1 and 2 are not.
TEST(Simulate, HopsOfEachPair) {
  const auto order = generate({.kind = Kind::gpipe, .ranks = 3, .microbatches = 1});
  const auto hop = [](int from, int to) { return from + to == 1 ? 0.5 : 10.0; };
  EXPECT_DOUBLE_EQ(simulate(order, uniform({}), hop).makespan, 9 + 2 * 0.5 + 2 * 10);
}

TEST(Simulate, ClosedFormsOfTime) {
  const Costs costs{.forward = 1, .input = 1.25, .weight = 0.75};
  const double f = costs.forward, i = costs.input, w = costs.weight, b = i + w;
  for (int p = 1; p <= 6; ++p) {
    for (int m = 2 * p; m <= 4 * p; m += p) {
      SCOPED_TRACE(std::to_string(p) + " ranks, " + std::to_string(m) + " micro-batches");
      const auto makespan = [&](Kind kind, int chunks, const Costs& of) {
        return simulate(generate({kind, p, m, chunks}), uniform(of)).makespan;
      };
      EXPECT_NEAR(makespan(Kind::round_robin, 1, costs), m * p * (f + b), 1e-9);
      EXPECT_NEAR(makespan(Kind::gpipe, 1, costs), (m + p - 1) * (f + b), 1e-9);
      EXPECT_NEAR(makespan(Kind::sequential, 1, costs), (m + p - 1) * (f + b), 1e-9);
      EXPECT_NEAR(makespan(Kind::one_f_one_b, 1, costs), (m + p - 1) * (f + b), 1e-9);
      for (const int v : {2, 3}) {
        EXPECT_NEAR(makespan(Kind::interleaved, v, costs), (m * v + p - 1) * (f + b), 1e-9);
        EXPECT_NEAR(makespan(Kind::looped_bfs, v, costs), (m * v + p - 1) * (f + b), 1e-9);
      }
      EXPECT_NEAR(makespan(Kind::zb_h1, 1, costs), m * (f + b) + (p - 1) * (f + i - w), 1e-9);
      EXPECT_NEAR(makespan(Kind::zb_h2, 1, {}), 3 * m + p - 1, 1e-9);
      EXPECT_NEAR(makespan(Kind::zb_v, 2, {}), 6 * m + p - 1, 1e-9);
    }
  }
}

TEST(Simulate, HopsBetweenRanksOnly) {
  const double hop = 1.0 / 64;
  const auto extra = [&](const ScheduleOptions& options) {
    const Schedule schedule = generate(options);
    const Cost cost = uniform({});
    return (simulate(schedule, cost, hop).makespan - simulate(schedule, cost).makespan) / hop;
  };
  EXPECT_DOUBLE_EQ(extra({Kind::one_f_one_b, 8, 24}), 54);
  EXPECT_DOUBLE_EQ(extra({Kind::one_f_one_b, 8, 64}), 124);
  EXPECT_DOUBLE_EQ(extra({Kind::zb_h1, 8, 24}), 4 * 7);
  EXPECT_DOUBLE_EQ(extra({Kind::interleaved, 4, 8, 2}), 2 * (4 * 2 - 1));
  EXPECT_DOUBLE_EQ(extra({Kind::round_robin, 3, 5}), 5 * 2 * 2);
  // The turn of the V, and a single rank, have none.
  EXPECT_DOUBLE_EQ(extra({Kind::zb_v, 1, 4, 2}), 0);
  EXPECT_DOUBLE_EQ(extra({Kind::interleaved, 1, 4, 3}), 0);
}

TEST(Simulate, CostsByRankAndOp) {
  const Schedule schedule = generate({Kind::one_f_one_b, 2, 2});
  const auto times = [&](const Cost& cost) { return simulate(schedule, cost).times; };
  // Rank 0: F0 F1 B0 B1. Rank 1: F0 B0 F1 B1.
  using Times = std::vector<std::vector<Interval>>;
  EXPECT_EQ(times(uniform({.forward = 2, .input = 3, .weight = 1})),
            (Times{{{0, 2}, {2, 4}, {8, 12}, {14, 18}}, {{2, 4}, {4, 8}, {8, 10}, {10, 14}}}));
  EXPECT_EQ(times(uniform({.forward = 2, .backward = 1})),
            (Times{{{0, 2}, {2, 4}, {5, 6}, {8, 9}}, {{2, 4}, {4, 5}, {5, 7}, {7, 8}}}));
  EXPECT_EQ(times([](int rank, const Action&) { return rank == 0 ? 1.0 : 4.0; }),
            (Times{{{0, 1}, {1, 2}, {9, 10}, {17, 18}}, {{1, 5}, {5, 9}, {9, 13}, {13, 17}}}));
  const Simulation nothing = simulate(schedule, uniform({.forward = 0, .input = 0, .weight = 0}));
  EXPECT_EQ(nothing.makespan, 0);
  EXPECT_EQ(nothing.bubble_makespan, 0);
}

TEST(Simulate, SpanAndBubblesOfTwoRanks) {
  const Simulation simulation =
      simulate(generate({Kind::one_f_one_b, 2, 2}), uniform({.forward = 1, .backward = 1}));
  // Rank 0 ends its forwards at 2 and has gradients from 3 and from 5 on.
  EXPECT_EQ(simulation.makespan, 6);
  EXPECT_THAT(simulation.span, ElementsAreArray({6.0, 4.0}));
  EXPECT_DOUBLE_EQ(simulation.bubble_makespan, 1 - 4.0 / 6);
  EXPECT_DOUBLE_EQ(simulation.bubble_span, 1 - 4.0 / 6);
}

// Another way to the same times: a clock that ticks, and every rank that can start something does.
std::vector<std::vector<Interval>> ticked(const Schedule& schedule) {
  std::vector<std::vector<Interval>> times(schedule.ranks);
  const auto ended = [&](int stage, int microbatch, bool forward, double now) {
    const Place place = schedule.place(stage);
    const auto& actions = schedule.actions[place.rank];
    for (size_t i = 0; i < times[place.rank].size(); ++i) {
      const Action& action = actions[i];
      if (action.chunk == place.chunk && action.microbatch == microbatch &&
          action.op != Op::backward_weight && (action.op == Op::forward) == forward) {
        return times[place.rank][i].end <= now;
      }
    }
    return false;
  };
  size_t left = 0;
  for (const auto& actions : schedule.actions) left += actions.size();
  for (double now = 0; left > 0; ++now) {
    for (int rank = 0; rank < schedule.ranks; ++rank) {
      auto& own = times[rank];
      if (own.size() == schedule.actions[rank].size()) continue;
      if (!own.empty() && own.back().end > now) continue;
      const Action& action = schedule.actions[rank][own.size()];
      const bool forward = action.op == Op::forward;
      const int other = schedule.stage(rank, action.chunk) + (forward ? -1 : 1);
      const bool needs =
          action.op != Op::backward_weight && other >= 0 && other < schedule.stages();
      if (needs && !ended(other, action.microbatch, forward, now)) continue;
      own.push_back({now, now + (action.op == Op::backward ? 2 : 1)});
      --left;
    }
  }
  return times;
}

TEST(Simulate, AgreesWithASimulationByClockTicks) {
  for (const auto& [options, rows] : tables()) {
    const Schedule schedule = generate(options);
    EXPECT_EQ(simulate(schedule, uniform({})).times, ticked(schedule))
        << layout::name_of(options.kind);
  }
  const Schedule schedule = generate({Kind::zb_1p, 3, 6, 3});
  EXPECT_EQ(simulate(schedule, uniform({})).times, ticked(schedule));
}

}  // namespace
}  // namespace lockstep::schedule
