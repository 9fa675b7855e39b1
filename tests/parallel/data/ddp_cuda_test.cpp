// SPDX-License-Identifier: Apache-2.0
// Ranks that share one GPU follow the CPU's curve. Built where CUDA is.
#include <ATen/Context.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/parallel/data/data_parallel.h"
#include "tests/parallel/data/replica_models.h"
#include "tests/parallel/training.h"
#include "tests/support/says.h"

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

// Inputs on the CPU, a model that is wrapped there and moved after the first step, and buckets of
// another size in the middle of an accumulation.
TEST(DdpCudaDevices, WrapperMovesInputsModelAndBuckets) {
  const Curve expected = train_alone<MlpTask>(8);
  auto ddp = parallel::ddp(MlpTask::make(1), world());
  const c10::Device device(at::kCUDA, 0);
  Curve curve;
  for (int step = 0; step < kSteps; ++step) {
    ddp.zero_grad();
    const int mine = 8 / world().size();
    const at::Tensor sum = at::zeros({1}, at::kDouble);
    for (int i = 0; i < mine; ++i) {
      const Batch batch = MlpTask::batch(step * 8 + world().rank() * mine + i);
      std::optional<parallel::NoSync> no_sync;
      if (i + 1 < mine) no_sync.emplace(ddp.no_sync());
      const at::Tensor loss = MlpTask::loss(ddp.forward(batch.input).cpu(), batch);
      (loss / mine).backward();
      sum.add_(loss.item<double>());
      if (i == 0 && step == 1) ddp.to(device);  // with the gradients of one micro-batch
      if (i == 0) ddp.set_bucket_size(step % 2 == 0 ? 1 : size_t{1} << 20);
    }
    const at::NoGradGuard no_grad;
    for (at::Tensor& parameter : ddp.parameters()) parameter.sub_(parameter.grad(), kLearningRate);
    comm::all_reduce(sum, world()).wait();
    curve.losses.push_back(sum.item<double>() / 8);
  }
  EXPECT_THAT(ddp.devices(), testing::ElementsAre(device));
  curve = finish(std::move(curve), *ddp.module());
  curve.weights = curve.weights.cpu();
  EXPECT_EQ(difference(curve, expected, 1e-4), "");
}

TEST(DdpCudaDevices, TakesTheDevicesOfAHost) {
  const std::vector<c10::Device> devices(2, c10::Device(at::kCUDA, 0));
  auto ddp = parallel::ddp_on_devices(MlpTask::make(1), world(), devices);
  EXPECT_THAT(ddp.devices(), testing::ElementsAre(devices[0]));
}

// Replicas that share one GPU, or are on a GPU and on the CPU, train as one process on the CPU.
class DataParallelCuda : public testing::TestWithParam<std::vector<c10::Device>> {};
INSTANTIATE_TEST_SUITE_P(, DataParallelCuda,
                         testing::Values(std::vector<c10::Device>(2, c10::Device(at::kCUDA, 0)),
                                         std::vector<c10::Device>{c10::Device(at::kCUDA, 0),
                                                                  c10::Device(at::kCPU)}));

TEST_P(DataParallelCuda, ForwardAndSyncFollowTheCpu) {
  world();  // without TF32
  auto alone = parallel::Conv::make();
  auto model = parallel::copy_of(alone);
  auto replicas = parallel::data_parallel(model, {.devices = GetParam()});
  torch::optim::SGD alone_optimizer(alone->parameters(), torch::optim::SGDOptions(0.05));
  torch::optim::SGD optimizer(replicas.parameters(), torch::optim::SGDOptions(0.05));
  for (uint64_t step = 0; step < 10; ++step) {
    const at::Tensor x = parallel::Conv::input(10, step), y = parallel::target(10, step);
    alone_optimizer.zero_grad();
    const at::Tensor expected = at::mse_loss(alone->forward(x), y);
    expected.backward();
    alone_optimizer.step();
    replicas.zero_grad();
    const at::Tensor output = replicas.forward(x);  // from the CPU
    EXPECT_EQ(output.device(), GetParam()[0]);
    const at::Tensor loss = at::mse_loss(output, y.to(at::kCUDA));
    ASSERT_LT(parallel::difference(loss.cpu(), expected), 1e-4) << "step " << step;
    loss.backward();
    replicas.sync_gradients();
    optimizer.step();
  }
  model->to(at::kCPU);
  EXPECT_LT(parallel::largest_difference(model, alone), 1e-4);
}

TEST_P(DataParallelCuda, RunsInAllModes) {
  for (const parallel::SyncMode mode :
       {parallel::SyncMode(parallel::Synchronous{}), parallel::SyncMode(parallel::Asynchronous{}),
        parallel::SyncMode(parallel::BoundedStaleness{1})}) {
    auto model = parallel::Mlp::make();
    auto replicas = parallel::data_parallel(model, {.devices = GetParam(), .mode = mode});
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05));
    const auto loss_of = [](torch::nn::SequentialImpl& net, size_t, int64_t) {
      const c10::Device device = net.parameters()[0].device();
      return at::mse_loss(net.forward(parallel::Mlp::input(8, 1).to(device)),
                          parallel::target(8, 1).to(device));
    };
    const double before = loss_of(*model, 0, 0).item<double>();
    const auto stats = replicas.run(20, loss_of, [&] { optimizer.step(); });
    EXPECT_THAT(stats.steps, testing::Each(20));
    EXPECT_LT(loss_of(*model, 0, 0).item<double>(), 0.7 * before);
  }
}

TEST(DataParallelCudaDevices, MoveTogetherOrNotAtAll) {
  const c10::Device gpu(at::kCUDA, 0), cpu(at::kCPU);
  auto replicas = parallel::data_parallel(parallel::Mlp::make(), {.devices = {cpu, cpu}});
  const at::Tensor x = parallel::Mlp::input(6, 0);
  at::Tensor expected = replicas.forward(x);
  expected.sum().backward();
  replicas.to(gpu);  // with gradients that are not synchronized
  replicas.sync_gradients();
  EXPECT_THAT(replicas.devices(), testing::Each(gpu));
  EXPECT_EQ(replicas.parameters()[0].grad().device(), gpu);
  EXPECT_LT(parallel::difference(replicas.forward(x).cpu(), expected), 1e-5);
  auto apart = parallel::data_parallel(parallel::Mlp::make(), {.devices = {gpu, cpu}});
  EXPECT_THAT(parallel::message_of([&] { apart.to(cpu); }), says("to(cpu) ... cuda:0, cpu"));
  apart.to(gpu);  // where the model is
  EXPECT_EQ(apart.devices().size(), 2U);
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
