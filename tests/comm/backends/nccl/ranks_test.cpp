// SPDX-License-Identifier: Apache-2.0
// NCCL itself with several ranks on one GPU, which LOCKSTEP_SHARE_GPU=1 allows.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "lockstep/comm/backends/nccl/adopt.h"
#include "lockstep/comm/backends/nccl/nccl.h"
#include "lockstep/comm/backends/nccl/runtime.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

const c10::Device kCuda(c10::kCUDA, 0);
const auto kOptions = at::TensorOptions().device(kCuda);

const Group& world() {
  static const Group group = init({.backend = "nccl"});
  return group;
}

double sum_to(int n) { return n * (n + 1) / 2.0; }

at::Tensor mine(int64_t elements = 1000) {
  return at::full({elements}, world().rank() + 1.0, kOptions);
}

TEST(NcclRanks, SplitsHaveTheirOwnMembers) {
  const int size = world().size(), rank = world().rank();
  const Group part = world().split(rank % 2, -rank);  // in reverse order
  EXPECT_EQ(part.backend(), size == 2 ? "none" : "nccl");
  const at::Tensor data = mine();
  all_reduce(data, part).wait();
  double expected = 0;
  for (int other = rank % 2; other < size; other += 2) expected += other + 1;
  EXPECT_EQ(data[999].item<double>(), expected);
}

// Both are in flight at once, on devices and hosts.
TEST(NcclRanks, OperationsOfSeveralGroupsRunAtOnce) {
  const Group other = world().split(0, world().rank());
  const int size = world().size();
  for (int round = 0; round < 20; ++round) {
    const at::Tensor a = mine(1 << 18), b = mine(1 << 18), host = mine(100).cpu();
    Work first = all_reduce(a, world()), second = all_reduce(b, other),
         third = all_reduce(host, world(), {.op = ReduceOp::max});
    third.wait();
    second.wait();
    first.wait();
    EXPECT_EQ(a.min().item<double>(), sum_to(size));
    EXPECT_EQ(b.max().item<double>(), sum_to(size));
    EXPECT_EQ(host[99].item<double>(), size);
  }
}

TEST(NcclRanks, SymmetricMemoryIsReducedInPlace) {
  const std::vector<int64_t> shape{1 << 20};
  const at::Tensor data = symmetric_empty(shape, DType::float32, world(), kCuda);
  data.fill_(world().rank() + 1);
  all_reduce(data, world()).wait();
  EXPECT_EQ(data.min().item<double>(), sum_to(world().size()));
  EXPECT_EQ(data.max().item<double>(), sum_to(world().size()));
}

TEST(NcclRanks, MessagesOfBothDirectionsCross) {
  const int size = world().size(), rank = world().rank();
  const int next = (rank + 1) % size, previous = (rank + size - 1) % size;
  for (int round = 0; round < 10; ++round) {
    const at::Tensor out = mine().add_(round), in = at::zeros_like(out);
    Work receives = recv(in, previous, world());
    Work sends = send(out, next, world());
    sends.wait();
    receives.wait();
    EXPECT_EQ(in.min().item<double>(), previous + 1 + round);
  }
}

TEST(NcclRanks, AdoptsACommunicatorOfTheProgram) {
  const nccl::Api& api = *nccl::library().api;
  nccl::UniqueId id{};
  if (world().rank() == 0) {
    ASSERT_EQ(api.get_unique_id(&id), nccl::Result::success);
  }
  const at::Tensor bytes =
      at::from_blob(id.internal, {static_cast<int64_t>(sizeof(id.internal))}, at::kByte);
  broadcast(bytes, world()).wait();
  ncclComm* comm = nullptr;
  nccl::Config config{.blocking = 1};
  ASSERT_EQ(api.comm_init_rank_config(&comm, world().size(), id, world().rank(), &config),
            nccl::Result::success);
  {
    const Group host = init({.backend = "shm"});
    const Group group = nccl::adopt(comm, host);
    const at::Tensor data = mine();
    all_reduce(data, group).wait();
    EXPECT_EQ(data[999].item<double>(), sum_to(world().size()));
  }
  EXPECT_EQ(api.comm_destroy(comm), nccl::Result::success);
}

// The last: ranks that disagree break their group, and say so on every rank.
TEST(NcclRanks, AMismatchIsNamedOnEveryRank) {
  const Group group = world().split(0, world().rank());
  const at::Tensor warm = mine();
  all_reduce(warm, group).wait();
  const at::Tensor data = mine(world().rank() == 1 ? 11 : 10);
  EXPECT_THAT([&] { all_reduce(data, group).wait(); },
              testing::ThrowsMessage<MismatchError>(testing::HasSubstr("rank 1")));
  const at::Tensor after = mine();
  all_reduce(after, world()).wait();
  EXPECT_EQ(after[0].item<double>(), sum_to(world().size()));
}

}  // namespace
}  // namespace lockstep::comm
