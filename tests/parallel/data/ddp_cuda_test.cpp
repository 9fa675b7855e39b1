// SPDX-License-Identifier: Apache-2.0
// Ranks that share one GPU follow the CPU's curve. Built where CUDA is.
#include <ATen/Context.h>
#include <gtest/gtest.h>

#include "tests/parallel/training.h"

namespace lockstep::test {
namespace {

using parallel::DdpOptions;

// A task whose model and batches live on the GPU.
template <class Task>
struct OnCuda : Task {
  static typename Task::Model make(uint64_t seed) {
    auto model = Task::make(seed);
    model->to(at::kCUDA);
    return model;
  }
  static Batch batch(int64_t index) {
    const Batch batch = Task::batch(index);
    return {batch.input.to(at::kCUDA), batch.target.to(at::kCUDA)};
  }
};

const comm::Group& world() {
  static const comm::Group group = [] {
    at::globalContext().setAllowTF32CuBLAS(false);
    at::globalContext().setAllowTF32CuDNN(false);
    return comm::init();
  }();
  return group;
}

template <class Task>
class DdpCuda : public testing::Test {};
using Tasks = testing::Types<MlpTask, ConvNetTask, EmbeddingTask, TransformerTask>;
TYPED_TEST_SUITE(DdpCuda, Tasks);

TYPED_TEST(DdpCuda, FollowsTheCpu) {
  Curve expected = train_alone<TypeParam>(8);
  const auto check = [&](DdpOptions options, double tolerance) {
    Curve curve = train_ddp<OnCuda<TypeParam>>(world(), 8, std::move(options));
    curve.weights = curve.weights.cpu();
    EXPECT_EQ(difference(curve, expected, tolerance), "");
  };
  check({}, 1e-4);
  check({.bucket_bytes = 2048, .static_graph = true}, 1e-4);
  check({.find_unused_parameters = true, .advanced = {.gradient_as_bucket_view = false}}, 1e-4);
  check({.reproducible = true}, 1e-4);
  check({.hook = parallel::hooks::bf16()}, 2e-2);
  check({.hook = parallel::hooks::power_sgd({.rank = 64, .start_step = 2, .min_compression = 0})},
        1e-3);
}

TEST(DdpCudaDevices, RanksShareTheDevicesThereAre) {
  EXPECT_TRUE(parallel::detected_device(world()).is_cuda());
}

TEST(CudaCollectives, TakeTensorsOfTheDevice) {
  const comm::Group& group = world();
  const at::Tensor sum = at::full({3, 5}, group.rank() + 1.0, at::kCUDA).t();
  comm::all_reduce(sum, group).wait();
  EXPECT_EQ(sum[2][1].item<double>(), group.size() * (group.size() + 1) / 2.0);
  const at::Tensor all =
      at::empty({group.size(), 2}, at::TensorOptions(at::kCUDA).dtype(at::kLong));
  comm::all_gather(all, at::full({2}, group.rank(), all.options()), group).wait();
  EXPECT_EQ(all[group.size() - 1][1].item<int64_t>(), group.size() - 1);
}

}  // namespace
}  // namespace lockstep::test
