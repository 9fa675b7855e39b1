// Pipelines of ranks on CUDA devices, which may share one, train as the CPU does.
#include <gtest/gtest.h>

#include "tests/parallel/pipeline_training.h"

namespace lockstep::test {
namespace {

TEST(PipelineCuda, TrainsAsTheCpu) {
  ASSERT_TRUE(torch::cuda::is_available());
  const comm::Group world = comm::init();
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
      const PipelineTrained on_gpu = train_pipeline(c, world);
      for (int i = 0; i < c.steps; ++i) {
        const auto step = static_cast<size_t>(i);
        EXPECT_NEAR(on_gpu.curve.losses[step], on_cpu.losses[step], 1e-4 * on_cpu.losses[step]);
        EXPECT_NEAR(on_gpu.curve.norms[step], on_cpu.norms[step], 1e-3 * on_cpu.norms[step]);
      }
    }
  }
}

}  // namespace
}  // namespace lockstep::test
