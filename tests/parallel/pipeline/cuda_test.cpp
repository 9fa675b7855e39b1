// SPDX-License-Identifier: Apache-2.0
// Ranks on CUDA devices, which may share one, train as the CPU does: as pipelines, and with
// matrices that they share.
#include <gtest/gtest.h>
#include <torch/cuda.h>

#include "tests/parallel/pipeline/training.h"

namespace lockstep::test {
namespace {

const comm::Group& shared_world() {
  static const comm::Group group = comm::init();
  return group;
}

void expect_near_cpu(const PipelineCurve& found, const PipelineCurve& on_cpu) {
  ASSERT_EQ(found.losses.size(), on_cpu.losses.size());
  for (size_t i = 0; i < found.losses.size(); ++i) {
    EXPECT_NEAR(found.losses[i], on_cpu.losses[i], 1e-4 * on_cpu.losses[i]);
    EXPECT_NEAR(found.norms[i], on_cpu.norms[i], 1e-3 * on_cpu.norms[i]);
  }
}

TEST(PipelineCuda, TrainsAsTheCpu) {
  ASSERT_TRUE(torch::cuda::is_available());
  const comm::Group& world = shared_world();
  for (const auto& [schedule, chunks] :
       {std::pair(PipelineSchedule::one_f_one_b, 1), std::pair(PipelineSchedule::interleaved, 2),
        std::pair(PipelineSchedule::zb_h1, 1), std::pair(PipelineSchedule::zb_v, 2)}) {
    for (const bool llama : {false, true}) {
      PipelineCase c{.schedule = schedule,
                     .ranks = world.size(),
                     .chunks = chunks,
                     .microbatches = 4,
                     .llama = llama,
                     .tied = !llama};
      SCOPED_TRACE(describe(c));
      const PipelineCurve on_cpu = train_one_process(c);
      c.device = parallel::detected_device(world);
      expect_near_cpu(train_pipeline(c, world).curve, on_cpu);
    }
  }
}

TEST(TensorCuda, TrainsAsTheCpu) {
  ASSERT_TRUE(torch::cuda::is_available());
  const comm::Group& world = shared_world();
  for (const bool sequence : {false, true}) {
    for (const bool llama : {false, true}) {
      PipelineCase c{.tp = world.size(),
                     .sequence_parallel = sequence,
                     .microbatches = 4,
                     .llama = llama,
                     .tied = !llama};
      SCOPED_TRACE(describe(c));
      const PipelineCurve on_cpu = train_one_process(c);
      c.device = parallel::detected_device(world);
      expect_near_cpu(train_pipeline(c, world).curve, on_cpu);
    }
  }
}

}  // namespace
}  // namespace lockstep::test
