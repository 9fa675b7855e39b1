// SPDX-License-Identifier: Apache-2.0
// What NCCL is asked to do for each operation, rank by rank.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "lockstep/comm/backends/nccl/nccl.h"
#include "lockstep/comm/collectives.h"
#include "tests/comm/backends/nccl/fake_nccl.h"

namespace lockstep::comm {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class NcclCalls : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    detail::add_backend(
        {"recorded", [] { return true; }, nccl::factory(fake::engine(), "recorded")});
  }
  void SetUp() override { fake::take_calls(); }

  // Runs the body on so many ranks, without comparing operations first.
  static std::vector<fake::Call> calls_of(int ranks,
                                          const std::function<void(const Group&)>& body) {
    run_threads(ranks, body, {.backend = "recorded", .check = false});
    return fake::take_calls();
  }
  static std::vector<std::string> of(const std::vector<fake::Call>& calls, int rank) {
    return fake::texts(calls, rank);
  }
};

TEST_F(NcclCalls, ReductionsHaveTheTypeAndTheOperation) {
  const auto reduce_all = [](at::ScalarType type, ReduceOp op) {
    return
        [=](const Group& group) { all_reduce(at::ones({1000}, type), group, {.op = op}).wait(); };
  };
  const std::pair<std::function<void(const Group&)>, std::string> cases[] = {
      {reduce_all(at::kFloat, ReduceOp::sum), "all_reduce(1000 x 7, op 0)"},
      {reduce_all(at::kDouble, ReduceOp::product), "all_reduce(1000 x 8, op 1)"},
      {reduce_all(at::kHalf, ReduceOp::max), "all_reduce(1000 x 6, op 2)"},
      {reduce_all(at::kBFloat16, ReduceOp::min), "all_reduce(1000 x 9, op 3)"},
      {reduce_all(at::kFloat, ReduceOp::avg), "all_reduce(1000 x 7, op 4)"},
      // Sums of int64, which are divided afterwards: of narrower numbers, and of two halves.
      {reduce_all(at::kChar, ReduceOp::avg), "all_reduce(1000 x 4, op 0)"},
      {reduce_all(at::kLong, ReduceOp::avg), "all_reduce(2000 x 4, op 0)"},
      {reduce_all(at::kInt, ReduceOp::sum), "all_reduce(1000 x 2, op 0)"},
      {reduce_all(at::kChar, ReduceOp::sum), "all_reduce(1000 x 0, op 0)"},
      {reduce_all(at::kByte, ReduceOp::sum), "all_reduce(1000 x 1, op 0)"},
      {reduce_all(at::kBool, ReduceOp::sum), "all_reduce(1000 x 1, op 2)"},
      {reduce_all(at::kBool, ReduceOp::product), "all_reduce(1000 x 1, op 3)"},
  };
  for (const auto& [body, text] : cases) {
    const auto calls = calls_of(2, body);
    EXPECT_THAT(of(calls, 0), ElementsAre(text));
    EXPECT_THAT(of(calls, 1), ElementsAre(text));
  }
}

TEST_F(NcclCalls, CollectivesOfEqualBlocks) {
  const auto calls = calls_of(2, [](const Group& group) {
    const at::Tensor whole = at::ones({20}), part = at::ones({10});
    reduce(whole, group, {.root = 1}).wait();
    broadcast(whole, group, {.root = 1}).wait();
    all_gather(whole, part, group).wait();
    reduce_scatter(part, whole, group, {.op = ReduceOp::avg}).wait();
  });
  for (const int rank : {0, 1}) {
    EXPECT_THAT(of(calls, rank),
                ElementsAre("reduce(20 x 7, op 0, root 1)", "broadcast(20 x 7, root 1)",
                            "all_gather(10 x 7)", "reduce_scatter(10 x 7, op 4)"));
  }
}

TEST_F(NcclCalls, UnequalBlocksAreOneCallEachAndEmptyOnesNone) {
  const auto calls = calls_of(3, [](const Group& group) {
    const std::vector<int64_t> counts{4, 0, 2};
    const at::Tensor whole = at::ones({6}),
                     mine = at::ones({counts[static_cast<size_t>(group.rank())]});
    all_gather(whole, mine, group, {.counts = counts}).wait();
    reduce_scatter(mine, whole, group, {.counts = counts}).wait();
  });
  for (const int rank : {0, 1, 2}) {
    EXPECT_THAT(of(calls, rank), ElementsAre("broadcast(4 x 7, root 0), grouped",
                                             "broadcast(2 x 7, root 2), grouped",
                                             "reduce(4 x 7, op 0, root 0), grouped",
                                             "reduce(2 x 7, op 0, root 2), grouped"));
  }
}

TEST_F(NcclCalls, SendsAndReceivesForWhatNcclHasNoNameFor) {
  const auto calls = calls_of(2, [](const Group& group) {
    const at::Tensor whole = at::ones({20}), part = at::ones({10}), other = at::ones({20});
    gather(whole, part, group, {.root = 0}).wait();
    scatter(part, whole, group, {.root = 0}).wait();
    all_to_all(other, whole, group).wait();
  });
  EXPECT_THAT(of(calls, 0),
              ElementsAre("recv(10 x 7, peer 1), grouped", "send(10 x 7, peer 1), grouped",
                          "send(10 x 7, peer 1), grouped", "recv(10 x 7, peer 1), grouped"));
  EXPECT_THAT(of(calls, 1),
              ElementsAre("send(10 x 7, peer 0)", "recv(10 x 7, peer 0)",
                          "send(10 x 7, peer 0), grouped", "recv(10 x 7, peer 0), grouped"));
}

TEST_F(NcclCalls, EmptyOperationsMakeNoCalls) {
  const auto calls = calls_of(2, [](const Group& group) {
    all_reduce(at::empty({0}), group).wait();
    all_gather(at::empty({0}), at::empty({0}), group).wait();
    barrier(group).wait();
  });
  EXPECT_THAT(calls, IsEmpty());  // no communicator either
}

TEST_F(NcclCalls, OneCommunicatorAndStreamForCollectives) {
  const auto calls = calls_of(2, [](const Group& group) {
    all_reduce(at::ones({10}), group).wait();
    broadcast(at::ones({10}), group).wait();
  });
  EXPECT_EQ(fake::count(calls, "get_unique_id"), 1);
  EXPECT_EQ(fake::count(calls, "init"), 2);
  EXPECT_EQ(fake::count(calls, "blocking init"), 0);
  EXPECT_EQ(fake::count(calls, "destroy"), 2);
  EXPECT_EQ(fake::count(calls, "abort"), 0);
  std::set<const void*> streams;
  std::set<int> ids;
  for (const fake::Call& call : calls) {
    if (call.rank == 0 && call.stream != nullptr) streams.insert(call.stream);
    if (call.function == "init") ids.insert(call.peer);
  }
  EXPECT_EQ(streams.size(), 1);
  EXPECT_EQ(ids.size(), 1);
}

TEST_F(NcclCalls, EachDirectionOfMessagesHasACommunicatorOfItsOwn) {
  const auto calls = calls_of(3, [](const Group& group) {
    // All send before anybody receives: on one stream nobody would get to his receive.
    const int next = (group.rank() + 1) % 3, previous = (group.rank() + 2) % 3;
    const at::Tensor received = at::empty({10});
    std::vector<Work> works;
    works.push_back(send(at::full({10}, group.rank(), at::kFloat), next, group));
    works.push_back(send(at::full({10}, 10 + group.rank(), at::kFloat), next, group));
    for (const int kind : {0, 10}) {
      recv(received, previous, group).wait();
      EXPECT_TRUE(at::equal(received, at::full({10}, kind + previous, at::kFloat)));
    }
    for (Work& work : works) work.wait();
  });
  EXPECT_EQ(fake::count(calls, "get_unique_id"), 3);
  EXPECT_EQ(fake::count(calls, "init"), 6);
  std::set<const void*> streams;
  for (const fake::Call& call : calls) {
    if (call.stream == nullptr) continue;
    EXPECT_EQ(call.size, 2);
    EXPECT_EQ(call.rank, call.function == "send" ? 0 : 1);  // the sender is the pair's first
    EXPECT_EQ(call.peer, call.function == "send" ? 1 : 0);
    EXPECT_EQ(call.count, 10);
    streams.insert(call.stream);
  }
  EXPECT_EQ(streams.size(), 6);
}

TEST_F(NcclCalls, SplitsHaveCommunicatorsOfTheirOwn) {
  const auto calls = calls_of(4, [](const Group& group) {
    const Group half = group.split(group.rank() % 2, 0);
    const at::Tensor data = at::full({5}, group.rank(), at::kFloat);
    all_reduce(data, half).wait();
    EXPECT_EQ(data[0].item<float>(), group.rank() % 2 == 0 ? 2 : 4);
    // A part of one rank does nothing.
    all_reduce(data, group.split(group.rank(), 0)).wait();
  });
  EXPECT_EQ(fake::count(calls, "init"), 4);
  for (const fake::Call& call : calls) {
    EXPECT_TRUE(call.function != "init" || call.size == 2);
  }
}

TEST_F(NcclCalls, AGroupOfOneCallsThemWhereItIsAskedTo) {
  run_threads(1,
              [](const Group& group) {
                const at::Tensor data = at::ones({5});
                all_reduce(data, group.split(0, 0)).wait();
                EXPECT_EQ(data[0].item<float>(), 1);
              },
              {.backend = "recorded", .check = true, .force_backend_on_single_rank = true});
  EXPECT_THAT(of(fake::take_calls(), 0), ElementsAre("all_reduce(5 x 7, op 0)"));
}

}  // namespace
}  // namespace lockstep::comm
