// SPDX-License-Identifier: Apache-2.0
// Collectives by strategies of ours: the conformance checks on every layout of hosts, the same bits
// everywhere, and what a failure looks like.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>

#include "lockstep/comm/backend.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/conformance/conformance.h"
#include "lockstep/core/error.h"
#include "tests/support/sampling.h"
#include "tests/support/says.h"

namespace lockstep::comm {
namespace {

using layout::CommStrategy;
using lockstep::test::says;
using ::testing::HasSubstr;

struct Case {
  std::string name, backend;
  CommStrategy strategy;
  std::vector<int> hosts;
};

std::string name_of(const ::testing::TestParamInfo<Case>& info) { return info.param.name; }

class Strategies : public ::testing::TestWithParam<Case> {
 protected:
  static void run(const std::function<void(Group)>& body) {
    const auto& [name, backend, strategy, hosts] = GetParam();
    run_threads(static_cast<int>(hosts.size()), body,
                {.backend = backend, .strategy = strategy, .check = true}, hosts);
  }
};

TEST_P(Strategies, PassTheConformanceChecks) {
  for (const ConformanceCheck& check : conformance_checks()) {
    SCOPED_TRACE(check.name);
    try {
      run(check.run);
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
  }
}

std::vector<Case> cases() {
  const std::vector<int> pairs{0, 0, 1, 1}, uneven{0, 1, 0, 0, 1}, one(4, 0);
  std::vector<Case> all = {
      {"ring_thread_5", "thread", CommStrategy::ring, {0, 0, 0, 0, 0}},
      {"ring_shm_2", "shm", CommStrategy::ring, {0, 0}},
      {"ring_gloo_3", "gloo", CommStrategy::ring, {0, 0, 0}},
      {"tree_thread_7", "thread", CommStrategy::tree, {0, 0, 0, 0, 0, 0, 0}},
      {"tree_shm_4", "shm", CommStrategy::tree, one},
      {"tree_gloo_2", "gloo", CommStrategy::tree, {0, 0}},
      {"hierarchical_thread_uneven", "thread", CommStrategy::hierarchical, uneven},
      {"hierarchical_thread_leaders", "thread", CommStrategy::hierarchical, {0, 1, 1}},
      {"hierarchical_gloo_pairs", "gloo", CommStrategy::hierarchical, pairs},
      {"hierarchical_gloo_apart", "gloo", CommStrategy::hierarchical, {0, 1}},
      {"hierarchical_gloo_one_host", "gloo", CommStrategy::hierarchical, {0, 0}}};
  if (!lockstep::test::tests_all()) {
    std::erase_if(all, [](const Case& one) {
      return one.name != "ring_thread_5" && one.name != "tree_shm_4" &&
             one.name != "hierarchical_thread_uneven" && one.name != "hierarchical_gloo_pairs";
    });
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(, Strategies, ::testing::ValuesIn(cases()), name_of);

// Numbers whose sum depends on the order it is taken in.
at::Tensor part_of(int rank, int64_t count) {
  return at::arange(count, at::kDouble).mul_(0.37 + rank).sin_().mul_(1e3).to(at::kFloat);
}

struct Large : ::testing::TestWithParam<CommStrategy> {};

// Vectors that go in several pieces, of different lengths: values, and the same bits on all ranks
// and from run to run.
TEST_P(Large, VectorsSentInSeveralPiecesAreSummedRight) {
  constexpr int kRanks = 5;
  constexpr int64_t kCount = 700'003;
  const std::vector<int64_t> counts{250'001, 0, 150'000, 300'001, 1};
  at::Tensor exact = at::zeros({kCount}, at::kDouble);
  for (int rank = 0; rank < kRanks; ++rank) exact += part_of(rank, kCount).to(at::kDouble);
  at::Tensor first;
  for (int run = 0; run < 2; ++run) {
    std::vector<at::Tensor> sums(kRanks);
    run_threads(kRanks,
                [&](const Group& group) {
                  const auto me = static_cast<size_t>(group.rank());
                  const at::Tensor sum = part_of(group.rank(), kCount);
                  all_reduce(sum, group).wait();
                  EXPECT_TRUE(at::allclose(sum.to(at::kDouble), exact, 1e-4, 1e-2));
                  sums[me] = sum;

                  const at::Tensor input = part_of(group.rank(), kCount), before = input.clone();
                  const at::Tensor block = at::empty({counts[me]}), whole = at::zeros({kCount});
                  reduce_scatter(block, input, group, {.counts = counts}).wait();
                  EXPECT_TRUE(at::equal(input, before));
                  all_gather(whole, block, group, {.counts = counts}).wait();
                  EXPECT_TRUE(at::allclose(whole.to(at::kDouble), exact, 1e-4, 1e-2));

                  const at::Tensor told = group.rank() == 3 ? sum.clone() : at::zeros({kCount});
                  broadcast(told, group, {.root = 3}).wait();
                  EXPECT_TRUE(at::equal(told, sum));
                },
                {.backend = "thread", .strategy = GetParam()}, {0, 1, 0, 1, 1});
    for (const at::Tensor& sum : sums) EXPECT_TRUE(at::equal(sum, sums[0]));
    if (run == 0) first = sums[0];
    EXPECT_TRUE(at::equal(sums[0], first));
  }
}

INSTANTIATE_TEST_SUITE_P(, Large,
                         ::testing::Values(CommStrategy::ring, CommStrategy::tree,
                                           CommStrategy::hierarchical, CommStrategy::adaptive),
                         [](const auto& info) { return std::string(layout::name_of(info.param)); });

// In one piece, several, and one more of a single element; with a rank that carries nothing across
// and without. Values, and the same bits on all ranks and from run to run.
TEST(Hierarchical, SumsInPieces) {
  constexpr int64_t kPiece = 1 << 20;
  const std::vector<int> even{0, 0, 1, 1}, uneven{0, 1, 0, 1, 1};
  for (const auto& hosts : {even, uneven}) {
    for (const int64_t count : {kPiece, kPiece + 1, 2 * kPiece - 1, 4 * kPiece + 3}) {
      SCOPED_TRACE(std::to_string(count) + " by " + std::to_string(hosts.size()));
      at::Tensor exact = at::zeros({count}, at::kDouble);
      for (int rank = 0; rank < static_cast<int>(hosts.size()); ++rank)
        exact += part_of(rank, count).to(at::kDouble);
      std::vector<at::Tensor> sums(2 * hosts.size());
      run_threads(
          static_cast<int>(hosts.size()),
          [&](const Group& group) {
            for (size_t run = 0; run < 2; ++run) {
              at::Tensor& sum = sums[2 * static_cast<size_t>(group.rank()) + run];
              sum = part_of(group.rank(), count);
              all_reduce(sum, group).wait();
            }
          },
          {.backend = "thread", .strategy = CommStrategy::hierarchical}, hosts);
      EXPECT_TRUE(at::allclose(sums[0].to(at::kDouble), exact, 1e-4, 1e-2));
      for (const at::Tensor& sum : sums) EXPECT_TRUE(at::equal(sum, sums[0]));
    }
  }
}

TEST(Tree, HasTheBitsOfSharedMemory) {
  for (const int ranks : {3, 6}) {
    for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg}) {
      const auto sum_with = [&](const std::string& backend, CommStrategy strategy) {
        at::Tensor result;
        run_threads(ranks,
                    [&](const Group& group) {
                      const at::Tensor sum = part_of(group.rank(), 100'001);
                      all_reduce(sum, group, {.op = op}).wait();
                      if (group.rank() == 0) result = sum;
                    },
                    {.backend = backend, .strategy = strategy});
        return result;
      };
      EXPECT_TRUE(at::equal(sum_with("gloo", CommStrategy::tree),
                            sum_with("thread", CommStrategy::all_reduce)));
    }
  }
}

// Several at once, by strategy and not, waited for in another order.
TEST(Strategy, OperationsAreIndependentOfTheBackends) {
  run_threads(4,
              [](const Group& group) {
                const at::Tensor a = at::full({300'000}, 1.0), b = at::full({100}, 2.0),
                                 c = at::full({3'000'000}, 3.0), d = at::zeros({4});
                const int next = (group.rank() + 1) % 4, last = (group.rank() + 3) % 4;
                const at::Tensor sent = at::full({10}, 1.0 * group.rank()), got = at::zeros({10});
                Work first = all_reduce(a, group), second = reduce(b, group, {.root = 2}),
                     third = all_reduce(c, group), there = send(sent, next, group),
                     here = recv(got, last, group);
                Work fourth = all_gather(d, at::full({1}, 1.0 * group.rank()), group);
                here.wait();
                fourth.wait();
                third.wait();
                second.wait();
                first.wait();
                there.wait();
                EXPECT_EQ(a[7].item<float>(), 4);
                EXPECT_EQ(b[7].item<float>(), group.rank() == 2 ? 8 : 2);
                EXPECT_EQ(c[7].item<float>(), 12);
                EXPECT_EQ(d[3].item<float>(), 3);
                EXPECT_EQ(got[0].item<float>(), last);
              },
              {.backend = "thread", .strategy = CommStrategy::hierarchical}, {0, 0, 1, 1});
}

TEST(Strategy, GroupsInherit) {
  run_threads(4,
              [](const Group& world) {
                EXPECT_EQ(world.strategy(), CommStrategy::hierarchical);
                EXPECT_EQ(world.backend(), "gloo");
                // Inside a host it is shared memory, whatever the world has.
                const Group host = world.split(world.rank() / 2, 0);
                EXPECT_EQ(host.backend(), "shm");
                EXPECT_EQ(host.strategy(), CommStrategy::hierarchical);
                const Group across = world.split(world.rank() % 2, 0);
                EXPECT_EQ(across.backend(), "gloo");
                const Group ring = world.with_strategy(CommStrategy::ring);
                EXPECT_EQ(ring.strategy(), CommStrategy::ring);
                for (const Group& group : {host, across, ring}) {
                  const at::Tensor sum = at::ones({3});
                  all_reduce(sum, group).wait();
                  EXPECT_EQ(sum[2].item<float>(), group.size());
                }
              },
              {.backend = "gloo", .strategy = CommStrategy::hierarchical}, {0, 0, 1, 1});
}

TEST(Strategy, AnOperationGoesOnThoughNobodyHasItsHandleOrItsGroup) {
  using Case = std::pair<std::string, CommStrategy>;
  for (const auto& [backend, strategy] :
       {Case{"thread", CommStrategy::ring}, Case{"gloo", CommStrategy::ring},
        Case{"thread", CommStrategy::all_reduce}, Case{"shm", CommStrategy::all_reduce},
        Case{"gloo", CommStrategy::all_reduce}}) {
    run_threads(3,
                [&](const Group& world) {
                  launch::Store& store = *detail::impl_of(world).membership().world->store;
                  const at::Tensor first = at::ones({300'000}), second = at::ones({10});
                  Group group = world.split(0, world.rank());
                  if (world.rank() != 0) {
                    store.get("dropped", Deadline(milliseconds{60'000}));
                    all_reduce(first, group).wait();
                    all_reduce(second, group).wait();
                  } else {
                    for (const at::Tensor& data : {first, second}) (void)all_reduce(data, group);
                    group = Group();
                    store.set("dropped", "yes");
                    const Deadline deadline(milliseconds{60'000});
                    while (first.use_count() + second.use_count() > 2 && !deadline.passed())
                      std::this_thread::yield();
                  }
                  EXPECT_EQ(first[7].item<float>(), 3);
                  EXPECT_EQ(second[7].item<float>(), 3);
                },
                {.backend = backend, .strategy = strategy});
  }
}

// Calls that are run by different means are compared all the same.
TEST(Strategy, RanksThatDisagreeAreNamed) {
  for (const std::string backend : {"thread", "gloo"}) {
    run_threads(
        3,
        [&](const Group& group) {
          const at::Tensor data = at::ones({8});
          try {
            (group.rank() == 1 ? reduce(data, group) : all_reduce(data, group)).wait();
            ADD_FAILURE() << "nothing was thrown";
          } catch (const MismatchError& error) {
            EXPECT_THAT(
                error.what(),
                says("group 'world' ... operation #1 ... ranks 0, 2 called all_reduce(float32[8], "
                     "sum) ... rank 1 called reduce(float32[8], sum, root 0)"));
          }
        },
        {.backend = backend, .strategy = CommStrategy::ring, .check = true});
  }
}

TEST(Strategy, ARankThatDoesNotComeIsATimeoutWithItsName) {
  for (const std::string backend : {"thread", "gloo"}) {
    run_threads(3,
                [&](const Group& group) {
                  const at::Tensor data = at::ones({1'000'000});
                  if (group.rank() == 2) {
                    // Stays until the others have given up.
                    detail::impl_of(group).membership().world->store->get(
                        "over/0", Deadline(milliseconds{60'000}));
                    detail::impl_of(group).membership().world->store->get(
                        "over/1", Deadline(milliseconds{60'000}));
                    return;
                  }
                  try {
                    all_reduce(data, group, {.timeout = milliseconds{700}, .tag = "sums"}).wait();
                    ADD_FAILURE() << "nothing was thrown";
                  } catch (const TimeoutError& error) {
                    EXPECT_THAT(error.what(),
                                HasSubstr("all_reduce(float32[1000000], sum, tag 'sums')"));
                    EXPECT_THAT(error.what(), HasSubstr("rank 2"));
                  }
                  // The group is of no further use.
                  EXPECT_THROW(all_reduce(data, group).wait(), CommError);
                  detail::impl_of(group).membership().world->store->set(
                      "over/" + std::to_string(group.rank()), "");
                },
                {.backend = backend, .strategy = CommStrategy::tree});
  }
}

// Pieces are on the network and in shared memory when the deadline passes; nobody has their tensor
// any more when they arrive, if they do.
TEST(Hierarchical, ATimeoutBetweenPiecesIsOneForAll) {
  run_threads(4,
              [&](const Group& group) {
                launch::Store& store = *detail::impl_of(group).membership().world->store;
                if (group.rank() == 3) {
                  for (const char* other : {"over/0", "over/1", "over/2"})
                    store.get(other, Deadline(milliseconds{60'000}));
                  return;
                }
                try {
                  all_reduce(at::ones({5'000'000}), group, {.timeout = milliseconds{700}}).wait();
                  ADD_FAILURE() << "nothing was thrown";
                } catch (const TimeoutError& error) {
                  EXPECT_THAT(error.what(), HasSubstr("all_reduce(float32[5000000], sum)"));
                }
                EXPECT_THROW(all_reduce(at::ones({1}), group).wait(), CommError);
                store.set("over/" + std::to_string(group.rank()), "");
              },
              {.backend = "gloo", .strategy = CommStrategy::hierarchical}, {0, 0, 1, 1});
}

}  // namespace
}  // namespace lockstep::comm
