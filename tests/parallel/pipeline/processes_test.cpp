// SPDX-License-Identifier: Apache-2.0
// The same comparisons with processes as ranks, on the backend that LOCKSTEP_TEST_BACKEND names.
#include <gtest/gtest.h>

#include "tests/parallel/pipeline/training.h"
#include "tests/parallel/process_world.h"

namespace lockstep::test {
namespace {

PipelineCase make_case(PipelineSchedule schedule) {
  const bool chunks =
      schedule == PipelineSchedule::interleaved || schedule == PipelineSchedule::zb_v;
  return {.schedule = schedule,
          .ranks = world().size(),
          .chunks = chunks ? 2 : 1,
          .microbatches = 4,
          .steps = 3};
}

class PipelineProcesses : public testing::TestWithParam<PipelineSchedule> {};

TEST_P(PipelineProcesses, FollowOneProcess) {
  for (const bool tied : {false, true}) {
    PipelineCase c = make_case(GetParam());
    c.tied = tied;
    c.llama = !tied;
    const PipelineCurve expected = train_one_process(c);
    const PipelineTrained trained = train_pipeline(c, world());
    ASSERT_EQ(trained.curve.losses.size(), 3u);
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_NEAR(trained.curve.losses[i], expected.losses[i], 1e-5 * expected.losses[i]);
      EXPECT_NEAR(trained.curve.norms[i], expected.norms[i], 1e-5 * expected.norms[i]);
    }
    for (const auto& [name, tensor] : trained.curve.weights)
      EXPECT_TRUE(at::allclose(tensor, expected.weights.at(name), 0, 1e-4)) << name;
  }
}

TEST_P(PipelineProcesses, ReproducibleGivesTheBitsOfOneProcess) {
  PipelineCase c = make_case(GetParam());
  c.reproducible = true;
  const PipelineCurve expected = train_one_process(c);
  const PipelineCurve found = train_pipeline(c, world()).curve;
  EXPECT_EQ(found.losses, expected.losses);
  EXPECT_EQ(found.norms, expected.norms);
  for (const auto& [name, tensor] : found.weights)
    EXPECT_TRUE(at::equal(tensor, expected.weights.at(name))) << name;
}

// Stages that are shared by two ranks each.
TEST(PipelineDataProcesses, FollowOneProcess) {
  PipelineCase c = make_case(PipelineSchedule::zb_v);
  c.ranks /= 2;
  c.dp = 2;
  const PipelineCurve expected = train_one_process(c);
  const PipelineCurve found = train_pipeline(c, world()).curve;
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_NEAR(found.losses[i], expected.losses[i], 1e-5 * expected.losses[i]);
    EXPECT_NEAR(found.norms[i], expected.norms[i], 1e-5 * expected.norms[i]);
  }
}

// Matrices that are shared by two ranks each, and on four ranks stages too.
TEST(TensorProcesses, FollowOneProcess) {
  for (const bool sequence : {false, true}) {
    PipelineCase c = make_case(world().size() == 2 ? PipelineSchedule::one_f_one_b
                                                   : PipelineSchedule::interleaved);
    c.ranks /= 2;
    c.tp = 2;
    c.sequence_parallel = sequence;
    c.llama = sequence;
    c.tied = !sequence;
    c.recompute = sequence ? layout::Recompute::full : layout::Recompute::none;
    expect_same(c, train_pipeline(c, world()).curve, train_one_process(c));
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, PipelineProcesses,
                         testing::Values(PipelineSchedule::one_f_one_b, PipelineSchedule::zb_h1,
                                         PipelineSchedule::zb_v, PipelineSchedule::interleaved));

}  // namespace
}  // namespace lockstep::test
