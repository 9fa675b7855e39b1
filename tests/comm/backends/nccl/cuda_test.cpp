// SPDX-License-Identifier: Apache-2.0
// NCCL itself, with one GPU: a group of one runs its operations on the device.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "lockstep/comm/backends/nccl/adopt.h"
#include "lockstep/comm/backends/nccl/nccl.h"
#include "lockstep/comm/backends/nccl/runtime.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/conformance/conformance.h"
#include "lockstep/core/trace.h"
#include "tests/support/subprocess.h"
#include "tests/support/trace_spans.h"

namespace lockstep::comm {
namespace {

const c10::Device kCuda(c10::kCUDA, 0);
const auto kOptions = at::TensorOptions().device(kCuda);

Group make_group(bool check = false) {
  return init({.backend = "nccl", .check = check, .force_backend_on_single_rank = true});
}

TEST(NcclCuda, IsChosenWhereEveryRankHasAGpu) {
  ASSERT_EQ(nccl::problem(), "");
  EXPECT_EQ(make_group().backend(), "nccl");
  EXPECT_EQ(init({.force_backend_on_single_rank = true}).backend(), "nccl");
  EXPECT_EQ(init().backend(), "none");
  EXPECT_GE(nccl::library().version, 21400);
}

TEST(NcclCuda, PassesTheConformanceChecks) {
  const Group world = make_group(true);
  for (const char* device : {"cpu", "cuda:0"}) {
    for (const ConformanceCheck& check : conformance_checks(false, device)) {
      const Group group = world.split(0, 0);
      EXPECT_NO_THROW(check.run(group)) << check.name;
    }
  }
}

// Nobody on the host waits: only events keep the streams in order.
TEST(NcclCuda, StreamsWaitForEachOther) {
  const Group group = make_group();
  for (const bool own_stream : {false, true}) {
    const c10::cuda::CUDAStreamGuard guard(own_stream ? c10::cuda::getStreamFromPool()
                                                      : c10::cuda::getDefaultCUDAStream());
    const at::Tensor sum = at::zeros({1 << 24}, kOptions);
    for (int round = 1; round <= 50; ++round) {
      const at::Tensor input = at::full({1 << 24}, 1, kOptions);
      at::Tensor output = at::empty_like(input);
      input.mul_(round);
      Work work = all_gather(output, input, group);
      if (round % 2 == 0) output.reset();  // the operation keeps it
      work.wait();
      if (output.defined()) sum.add_(output);
    }
    EXPECT_EQ(sum.min().item<float>(), 625);
    EXPECT_EQ(sum.max().item<float>(), 625);
  }
}

TEST(NcclCuda, CommunicationRunsBesideComputation) {
  const Group group = make_group();
  const at::Tensor input = at::ones({int64_t{1} << 28}, kOptions), output = at::empty_like(input);
  const at::Tensor weights = at::randn({8192, 8192}, kOptions).div_(100);
  at::Tensor product = weights.matmul(weights);
  all_gather(output, input, group).wait();  // connects
  C10_CUDA_CHECK(cudaDeviceSynchronize());

  const auto start = Clock::now();
  Work work = all_gather(output, input, group, {.tag = "beside"});
  for (int i = 0; i < 100; ++i) product = weights.matmul(product);
  cudaEvent_t computed = nullptr;
  C10_CUDA_CHECK(cudaEventCreate(&computed));
  C10_CUDA_CHECK(cudaEventRecord(computed, c10::cuda::getCurrentCUDAStream().stream()));
  const Deadline deadline(milliseconds{20'000});
  while (!work.done() && !deadline.passed()) continue;
  const bool still_computing = cudaEventQuery(computed) == cudaErrorNotReady;
  cudaGetLastError();
  EXPECT_TRUE(still_computing) << "the operation was over only after the computation";
  work.wait();
  C10_CUDA_CHECK(cudaEventSynchronize(computed));
  trace::Row(0, "gpu compute").add("compute", "matmuls", start, Clock::now());
  C10_CUDA_CHECK(cudaEventDestroy(computed));
  // A look at what is over comes within 20 ms, and then it is in the trace.
  nlohmann::json events;
  for (const Deadline patience(milliseconds{5000}); !patience.passed();) {
    trace::flush();
    events = test::read_trace(std::getenv("LOCKSTEP_TRACE"));
    if (!test::spans(events, 0, "all_gather", "beside").empty()) break;
  }
  const auto gathers = test::spans(events, 0, "all_gather", "beside"),
             computes = test::spans(events, 0, "matmuls");
  ASSERT_EQ(gathers.size(), 1);
  ASSERT_EQ(computes.size(), 1);
  EXPECT_TRUE(test::overlap(gathers[0], computes[0]));
  EXPECT_LT(gathers[0].end, computes[0].end);
  EXPECT_GT(gathers[0].end - gathers[0].start, 100);  // microseconds: 1 GB takes some
  EXPECT_EQ(gathers[0].bytes, int64_t{1} << 30);
}

TEST(NcclCuda, SymmetricMemoryIsNcclsAndRegistered) {
  const std::vector<int64_t> large{1 << 24}, small{100};
  for (const bool connected : {false, true}) {
    const Group group = make_group();
    if (connected) all_reduce(at::ones({1}, kOptions), group).wait();
    at::Tensor data = symmetric_empty(large, DType::float32, group, kCuda).fill_(3);
    const at::Tensor output = symmetric_empty(large, DType::float32, group, kCuda);
    EXPECT_EQ(data.device(), kCuda);
    EXPECT_EQ(is_symmetric(data, group), nccl::library().api->mem_alloc != nullptr);
    all_gather(output, data, group).wait();
    all_reduce(data, group, {.op = ReduceOp::avg}).wait();
    EXPECT_TRUE(at::equal(output, data));
    EXPECT_EQ(data.sum().item<double>(), 3.0 * (1 << 24));
    EXPECT_FALSE(is_symmetric(symmetric_empty(small, DType::float32, group, kCuda), group));
  }
  // It may outlive its group.
  at::Tensor kept = symmetric_empty(large, DType::float32, make_group(), kCuda).fill_(7);
  EXPECT_EQ(kept.min().item<float>(), 7);
}

TEST(NcclCuda, OrderedSumsStayOnTheDevice) {
  const Group group = make_group();
  const at::Tensor data = at::randn({1001}, kOptions.dtype(at::kHalf)), before = data.clone();
  all_reduce_ordered(data, group, {.op = ReduceOp::avg}).wait();
  EXPECT_TRUE(at::equal(data, before));
}

TEST(NcclCuda, AdoptsACommunicator) {
  const nccl::Api& api = *nccl::library().api;
  nccl::UniqueId id{};
  ASSERT_EQ(api.get_unique_id(&id), nccl::Result::success);
  ncclComm* comm = nullptr;
  nccl::Config config{.blocking = 1};
  ASSERT_EQ(api.comm_init_rank_config(&comm, 1, id, 0, &config), nccl::Result::success);
  {
    const Group group =
        nccl::adopt(comm, init({.backend = "shm", .force_backend_on_single_rank = true}));
    const at::Tensor input = at::arange(1000, kOptions), output = at::empty_like(input);
    all_gather(output, input, group).wait();
    EXPECT_TRUE(at::equal(output, input));
    const at::Tensor host = at::arange(10), copy = at::empty_like(host);
    all_gather(copy, host, group).wait();
    EXPECT_TRUE(at::equal(copy, host));
  }
  EXPECT_EQ(api.comm_destroy(comm), nccl::Result::success);
}

}  // namespace
}  // namespace lockstep::comm

int main(int argc, char** argv) {
  const lockstep::test::TempDir folder;
  setenv("LOCKSTEP_TRACE", folder.path().c_str(), 1);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
