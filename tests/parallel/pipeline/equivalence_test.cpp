// SPDX-License-Identifier: Apache-2.0
// Every schedule trains as one process does.
#include <gtest/gtest.h>

#include <mutex>

#include "lockstep/schedule/simulate.h"
#include "tests/parallel/pipeline/training.h"
#include "tests/support/sampling.h"

namespace lockstep::test {
namespace {

void compare(const PipelineCase& c) {
  const PipelineCurve& expected = one_process(c);
  comm::run_threads(c.ranks * c.dp, [&](const comm::Group& world) {
    SCOPED_TRACE(describe(c));
    const PipelineTrained trained = train_pipeline(c, world);
    expect_same(c, trained.curve, expected);
    const auto simulated = schedule::simulate(trained.schedule, schedule::uniform({}));
    const int rank = world.rank() % c.ranks;
    EXPECT_EQ(trained.stats.peak_live, simulated.peak_live[static_cast<size_t>(rank)]) << rank;
  });
}

struct KindCase {
  PipelineSchedule schedule;
  int chunks;
};

const std::vector<KindCase>& kinds() {
  static const std::vector<KindCase> all = {
      {PipelineSchedule::gpipe, 1},       {PipelineSchedule::sequential, 1},
      {PipelineSchedule::round_robin, 1}, {PipelineSchedule::one_f_one_b, 1},
      {PipelineSchedule::interleaved, 2}, {PipelineSchedule::looped_bfs, 2},
      {PipelineSchedule::zb_h1, 1},       {PipelineSchedule::zb_h2, 1},
      {PipelineSchedule::zb_1p, 2},       {PipelineSchedule::zb_v, 2},
      {PipelineSchedule::dualpipe_v, 2}};
  return all;
}

PipelineCase make(const KindCase& kind, int ranks) {
  const bool pairs = kind.schedule == PipelineSchedule::dualpipe_v;
  return {.schedule = kind.schedule,
          .ranks = ranks,
          .chunks = kind.chunks,
          .microbatches = pairs ? std::max(4, 2 * ranks) : std::max(4, ranks)};
}

class EverySchedule : public testing::TestWithParam<int> {};

// GPT and Llama, tied and not, take turns. On eight ranks the test below says more.
TEST_P(EverySchedule, TrainsAsOneProcess) {
  const int ranks = GetParam();
  if (ranks > 4 && !tests_all()) return;
  int turn = ranks / 4;
  for (const KindCase& kind : kinds()) {
    ++turn;
    for (int model = 0; model < 4; ++model) {
      if (!tests_all() && model != turn % 4) continue;
      PipelineCase c = make(kind, ranks);
      c.llama = (model & 1) != 0;
      c.tied = (model & 2) != 0;
      compare(c);
    }
  }
}

TEST_P(EverySchedule, GivesTheBitsOfOneProcess) {
  const int ranks = GetParam();
  int turn = ranks;
  for (const KindCase& kind : kinds()) {
    ++turn;
    for (const bool llama : {false, true}) {
      if (!tests_all() && llama != (turn % 2 == 0)) continue;
      PipelineCase c = make(kind, ranks);
      c.llama = llama;
      c.reproducible = true;
      if (ranks > 4 && !tests_all()) c.steps = 3;
      compare(c);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, EverySchedule, testing::Values(1, 2, 4, 8));

}  // namespace
}  // namespace lockstep::test
