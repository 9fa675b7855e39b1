// SPDX-License-Identifier: Apache-2.0
// The same comparisons with processes as ranks, on the backend that LOCKSTEP_TEST_BACKEND names.
#include <gtest/gtest.h>

#include "tests/parallel/process_world.h"
#include "tests/parallel/training.h"

namespace lockstep::test {
namespace {

using parallel::DdpOptions;

template <class Task>
class DdpProcesses : public testing::Test {};
using Tasks = testing::Types<MlpTask, ConvNetTask, EmbeddingTask, TransformerTask>;
TYPED_TEST_SUITE(DdpProcesses, Tasks);

TYPED_TEST(DdpProcesses, FollowOneProcess) {
  const Curve expected = train_alone<TypeParam>(micro_batches());
  const auto check = [&](DdpOptions options, double tolerance) {
    EXPECT_EQ(difference(train_ddp<TypeParam>(world(), micro_batches(), std::move(options)),
                         expected, tolerance),
              "");
  };
  check({.bucket_bytes = 4096}, 1e-5);
  check({.static_graph = true, .uneven_inputs = true}, 1e-5);
  check({.find_unused_parameters = true,
         .advanced = {.gradient_as_bucket_view = false, .delay_all_reduce = true}},
        1e-5);
  check({.hook = parallel::hooks::fp16()}, 2e-3);
  check({.hook = parallel::hooks::power_sgd({.rank = 64, .start_step = 2, .min_compression = 0})},
        2e-4);
}

TYPED_TEST(DdpProcesses, ReproducibleGivesTheBitsOfOneProcess) {
  if (world().size() == 3) return;  // the promise is about powers of two
  const DdpOptions options{.bucket_bytes = 2048, .reproducible = true};
  const Curve alone = train_ddp<TypeParam>(comm::Group(), micro_batches(), options);
  const Curve curve = train_ddp<TypeParam>(world(), micro_batches(), options);
  EXPECT_TRUE(at::equal(curve.weights, alone.weights));
}

}  // namespace
}  // namespace lockstep::test
