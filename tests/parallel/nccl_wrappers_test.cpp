// SPDX-License-Identifier: Apache-2.0
// Every wrapper over NCCL, on a fake of it: what is trained is what one process trains, and all
// that is communicated goes through NCCL.
#include <gtest/gtest.h>

#include <set>

#include "lockstep/comm/backends/nccl/nccl.h"
#include "tests/comm/backends/nccl/fake_nccl.h"
#include "tests/parallel/pipeline/training.h"

namespace lockstep::test {
namespace {

namespace fake = comm::fake;
using parallel::ShardingStrategy;

class NcclWrappers : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    comm::detail::add_backend(
        {"wrapped", [] { return true; }, comm::nccl::factory(fake::engine(), "wrapped")});
  }
  void SetUp() override { fake::take_calls(); }

  // The functions of NCCL that were called to move data.
  static std::set<std::string> functions_of(const PipelineCase& c) {
    const PipelineCurve& expected = one_process(c);
    comm::run_threads(c.world(),
                      [&](const comm::Group& world) {
                        SCOPED_TRACE(describe(c));
                        expect_same(c, train_pipeline(c, world).curve, expected);
                      },
                      {.backend = "wrapped"});
    std::set<std::string> functions;
    for (const fake::Call& call : fake::take_calls()) {
      EXPECT_NE(call.function, "abort");
      if (call.stream != nullptr) functions.insert(call.function);
    }
    return functions;
  }
  static PipelineCase sharded(ShardingStrategy strategy) {
    PipelineCase c{.dp = 2, .microbatches = 4, .steps = 5};
    c.shard = parallel::FullyShardOptions{
        .strategy = strategy, .min_num_params = 1, .use_orig_params = true};
    c.shard->units = units_of_language_model();
    return c;
  }
};

TEST_F(NcclWrappers, DataParallel) {
  PipelineCase c{.dp = 2, .microbatches = 4, .steps = 5};
  EXPECT_TRUE(functions_of(c).contains("all_reduce"));
  c.reproducible = true;
  EXPECT_TRUE(functions_of(c).contains("all_gather"));
}

TEST_F(NcclWrappers, Sharded) {
  for (const auto strategy : {ShardingStrategy::full_shard, ShardingStrategy::shard_grad_op,
                              ShardingStrategy::optimizer}) {
    const auto functions = functions_of(sharded(strategy));
    const bool whole = strategy == ShardingStrategy::optimizer;  // gradients
    EXPECT_EQ(functions.contains("reduce_scatter") || functions.contains("reduce"), !whole);
    EXPECT_TRUE(!whole || functions.contains("all_reduce"));
    EXPECT_TRUE(functions.contains("all_gather") || functions.contains("broadcast"));
  }
}

TEST_F(NcclWrappers, Tensor) {
  for (const bool sequence : {false, true}) {
    const PipelineCase c{
        .tp = 2, .sequence_parallel = sequence, .microbatches = 4, .llama = true, .steps = 5};
    const auto functions = functions_of(c);
    EXPECT_TRUE(functions.contains("all_reduce"));
    EXPECT_EQ(functions.contains("reduce_scatter"), sequence);
  }
}

TEST_F(NcclWrappers, Pipeline) {
  for (const auto schedule : {PipelineSchedule::one_f_one_b, PipelineSchedule::zb_h1}) {
    const PipelineCase c{
        .schedule = schedule, .ranks = 2, .microbatches = 4, .tied = true, .steps = 5};
    const auto functions = functions_of(c);
    EXPECT_TRUE(functions.contains("send"));
    EXPECT_TRUE(functions.contains("recv"));
  }
}

TEST_F(NcclWrappers, DataTensorAndPipelineParallel) {
  PipelineCase c = sharded(ShardingStrategy::full_shard);
  c.ranks = 2;
  c.tp = 2;
  c.steps = 3;
  functions_of(c);
}

}  // namespace
}  // namespace lockstep::test
