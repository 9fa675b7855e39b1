// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>

#include "lockstep/core/error.h"
#include "lockstep/schedule/render/render.h"
#include "lockstep/schedule/schedule.h"
#include "tests/schedule/tables.h"
#include "tests/support/says.h"

namespace lockstep::schedule {
namespace {

using test::says;
using ::testing::ThrowsMessage;

TEST(Generate, FourRanksAsWrittenOut) {
  for (const auto& [options, rows] : tables()) {
    const Schedule schedule = generate(options);
    for (int rank = 0; rank < 4; ++rank) {
      EXPECT_EQ(ops(schedule.actions[rank], schedule.chunks), rows[rank])
          << layout::name_of(options.kind) << " rank " << rank;
    }
  }
}

TEST(Generate, SmallSchedulesWrittenByHand) {
  const auto rows = [](const ScheduleOptions& options) {
    const Schedule schedule = generate(options);
    std::vector<std::string> lines;
    for (const auto& actions : schedule.actions) lines.push_back(ops(actions, schedule.chunks));
    return lines;
  };
  using Rows = std::vector<std::string>;
  EXPECT_EQ(rows({.kind = Kind::round_robin, .ranks = 2, .microbatches = 3}),
            (Rows{"F0 B0 F1 B1 F2 B2", "F0 B0 F1 B1 F2 B2"}));
  EXPECT_EQ(rows({.kind = Kind::sequential, .ranks = 1, .microbatches = 3}),
            (Rows{"F0 F1 F2 B2 B1 B0"}));
  EXPECT_EQ(rows({.kind = Kind::looped_bfs, .ranks = 1, .microbatches = 2, .chunks = 2}),
            (Rows{"F0.0 F1.0 F0.1 F1.1 B1.1 B0.1 B1.0 B0.0"}));
  // Fewer micro-batches than ranks: there is no steady part on the first ranks.
  EXPECT_EQ(rows({.kind = Kind::one_f_one_b, .ranks = 3, .microbatches = 1}),
            (Rows{"F0 B0", "F0 B0", "F0 B0"}));
  EXPECT_EQ(rows({.kind = Kind::zb_h1, .ranks = 3, .microbatches = 2}),
            (Rows{"F0 F1 I0 W0 I1 W1", "F0 F1 I0 I1 W0 W1", "F0 I0 F1 I1 W0 W1"}));
  EXPECT_EQ(rows({.kind = Kind::zb_1p, .ranks = 2, .microbatches = 2, .chunks = 2}),
            (Rows{"F0.0 F1.0 F0.1 F1.1 I0.1 W0.1 I1.1 W1.1 I0.0 W0.0 I1.0 W1.0",
                  "F0.0 F1.0 F0.1 I0.1 F1.1 I1.1 W0.1 I0.0 W1.1 I1.0 W0.0 W1.0"}));
  // The schedule of five micro-batches without the last three.
  EXPECT_EQ(rows({.kind = Kind::zb_v, .ranks = 3, .microbatches = 2, .chunks = 2})[2],
            "F0.0 F0.1 F1.0 F1.1 I0.1 W0.1 I0.0 W0.0 I1.1 W1.1 I1.0 W1.0");
  EXPECT_EQ(rows({.kind = Kind::zb_v, .ranks = 1, .microbatches = 2, .chunks = 2}),
            (Rows{"F0.0 F0.1 I0.1 W0.1 F1.0 I0.0 W0.0 F1.1 I1.1 W1.1 I1.0 W1.0"}));
}

TEST(Generate, ZeroBubbleInterleavedWithOneChunkIsH1) {
  for (const auto& [p, m] : {std::pair{4, 8}, std::pair{5, 3}, std::pair{1, 4}}) {
    EXPECT_EQ(generate({.kind = Kind::zb_1p, .ranks = p, .microbatches = m}).actions,
              generate({.kind = Kind::zb_h1, .ranks = p, .microbatches = m}).actions);
  }
}

// Which numbers are allowed, stated again: v chunks, p ranks, m micro-batches, groups of n.
bool allowed(Kind kind, int p, int m, int v, int n) {
  const bool groups = p <= n && n <= m && (m % n == 0 || m % n >= p);
  switch (kind) {
    case Kind::interleaved:
      return v >= 2 && groups;
    case Kind::zb_1p:
      return v == 1 || groups;
    case Kind::looped_bfs:
      return v >= 2;
    case Kind::zb_v:
      return v == 2;
    case Kind::dualpipe_v:
      return v == 2 && m >= 2 * p;
    default:
      return v == 1;
  }
}

// Most micro-batches on a chunk that rank r holds at a time; nothing where there is no closed form.
std::optional<int> expected_peak(const Schedule& schedule, int r, int n) {
  const int p = schedule.ranks, m = schedule.microbatches, v = schedule.chunks;
  switch (schedule.kind) {
    case Kind::round_robin:
      return 1;
    case Kind::sequential:
    case Kind::gpipe:
      return m;
    case Kind::one_f_one_b:
      return std::min(m, p - r);
    case Kind::interleaved:
      return std::min(m * v, (v - 1) * n + 2 * (p - r - 1) + 1);
    case Kind::looped_bfs:
      return m * v;
    case Kind::zb_h1:
      return std::min(m, p);
    case Kind::zb_h2:
      return std::min(m, 2 * p - 1);
    case Kind::zb_1p:
      return std::min(m * v, (v - 1) * n + p);
    case Kind::zb_v:
      return m >= 2 * p - 1 ? std::optional(2 * p) : std::nullopt;
    case Kind::dualpipe_v:
      return 2 * p + 1;
    default:
      return std::nullopt;
  }
}

// generate() validates what it returns; here only that it returns where it may, and the memory.
void check(const ScheduleOptions& options) {
  const auto [kind, p, m, v, group, file] = options;
  const int n = group == 0 ? p : group;
  SCOPED_TRACE(std::string(layout::name_of(kind)) + " p " + std::to_string(p) + " m " +
               std::to_string(m) + " v " + std::to_string(v) + " n " + std::to_string(n));
  if (!allowed(kind, p, m, v, n)) {
    EXPECT_THROW(generate(options), ConfigError);
    return;
  }
  const Schedule schedule = generate(options);
  const Simulation simulation = simulate(schedule, uniform({}));
  const bool v_shaped = kind == Kind::zb_v || kind == Kind::dualpipe_v;
  EXPECT_EQ(schedule.order, v_shaped ? StageOrder::v : StageOrder::loop);
  for (int r = 0; r < p; ++r) {
    if (const auto peak = expected_peak(schedule, r, n)) {
      EXPECT_EQ(simulation.peak_live[r], *peak) << "rank " << r;
    }
  }
}

TEST(Generate, AllKindsOnAGrid) {
  for (int kind = 0; kind < static_cast<int>(Kind::file); ++kind) {
    for (int p = 1; p <= 8; ++p) {
      for (int m = 1; m <= 24; ++m) {
        for (int v = 1; v <= 4; ++v) {
          check({.kind = static_cast<Kind>(kind), .ranks = p, .microbatches = m, .chunks = v});
        }
      }
    }
  }
}

TEST(Generate, AllGroups) {
  for (const Kind kind : {Kind::interleaved, Kind::zb_1p}) {
    for (const int p : {1, 2, 3, 4, 6}) {
      for (int m = 1; m <= 18; ++m) {
        for (int n = 1; n <= 18; ++n) {
          check({.kind = kind, .ranks = p, .microbatches = m, .chunks = 3, .group = n});
        }
      }
    }
  }
}

TEST(Generate, RejectsOptionsThatAKindDoesNotAllow) {
  const auto refused = [](const ScheduleOptions& options, const char* message) {
    EXPECT_THAT([&] { generate(options); }, ThrowsMessage<ConfigError>(says(message)));
  };
  refused({.kind = Kind::gpipe, .ranks = 2, .microbatches = 2, .chunks = 2},
          "[schedule] ... gpipe ... chunks is 2 ... one chunk ... interleaved, looped-bfs, zb-1p, "
          "zb-v and dualpipe-v");
  refused({.kind = Kind::interleaved, .ranks = 2, .microbatches = 2},
          "[schedule] ... interleaved ... chunks is 1 ... at least 2 ... use 1f1b");
  refused({.kind = Kind::looped_bfs, .ranks = 2, .microbatches = 2},
          "[schedule] ... looped-bfs ... chunks is 1 ... at least 2 ... use sequential");
  refused({.kind = Kind::zb_v, .ranks = 2, .microbatches = 2, .chunks = 3},
          "[schedule] ... zb-v ... chunks is 3 ... 2");
  refused({.kind = Kind::dualpipe_v, .ranks = 4, .microbatches = 7, .chunks = 2},
          "[schedule] ... dualpipe-v ... microbatches is 7 ... at least twice ... 8");
  refused({.kind = Kind::interleaved, .ranks = 4, .microbatches = 8, .chunks = 2, .group = 3},
          "[schedule] ... interleaved ... group is 3 ... number of ranks, 4");
  refused({.kind = Kind::interleaved, .ranks = 4, .microbatches = 3, .chunks = 2},
          "[schedule] ... interleaved ... microbatches is 3 ... the group, 4");
  refused(
      {.kind = Kind::zb_1p, .ranks = 4, .microbatches = 10, .chunks = 2},
      "[schedule] ... zb-1p ... microbatches 10 ... groups of 4 leaves 2 ... number of ranks, 4");
  refused({.kind = Kind::one_f_one_b, .ranks = 4, .microbatches = 8, .group = 4},
          "[schedule] ... 1f1b ... group is 4 ... only interleaved and zb-1p have groups");
  refused({.kind = Kind::one_f_one_b, .ranks = 0},
          "[schedule] ... 1f1b ... ranks is 0 ... at least 1");
  refused({.kind = Kind::one_f_one_b, .ranks = 1, .microbatches = -1},
          "[schedule] ... 1f1b ... microbatches is -1 ... at least 1");
  refused({.kind = Kind::zb_1p, .chunks = 0},
          "[schedule] ... zb-1p ... chunks is 0 ... at least 1");
  refused({.kind = Kind::gpipe, .file = "x.csv"}, "[schedule] ... gpipe ... x.csv ... kind file");
  refused({.kind = Kind::file}, "[schedule] file ... named");
  refused({.kind = Kind::gpipe, .ranks = 2'000'000'000, .microbatches = 2'000'000'000},
          "[schedule] ... gpipe ... 2000000000 ranks x 2000000000 micro-batches x 1 chunks ... at "
          "most 4194304");
}

TEST(Pipeline, StagesLieWhereTheOrderSays) {
  const Pipeline loop{Kind::interleaved, 3, 3, 2, StageOrder::loop};
  const Pipeline v{Kind::zb_v, 3, 3, 2, StageOrder::v};
  EXPECT_EQ(loop.stages(), 6);
  EXPECT_EQ(loop.place(4), (Place{1, 1}));
  EXPECT_EQ(v.place(3), (Place{2, 1}));
  EXPECT_EQ(v.place(5), (Place{0, 1}));
  for (const Pipeline* pipeline : {&loop, &v}) {
    for (int stage = 0; stage < 6; ++stage) {
      const Place place = pipeline->place(stage);
      EXPECT_EQ(pipeline->stage(place.rank, place.chunk), stage);
    }
  }
  EXPECT_EQ(loop.peer(2, {Op::send_activation, 0, 0}), 0);
  EXPECT_EQ(loop.peer(0, {Op::recv_activation, 0, 1}), 2);
  EXPECT_EQ(v.peer(2, {Op::send_activation, 0, 1}), 1);
  EXPECT_EQ(v.peer(1, {Op::recv_gradient, 0, 1}), 0);
  EXPECT_EQ(v.peer(1, {Op::send_gradient, 0, 0}), 0);
}

}  // namespace
}  // namespace lockstep::schedule
