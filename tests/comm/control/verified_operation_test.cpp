// SPDX-License-Identifier: Apache-2.0
// What arrives damaged from another host is found and its sender is named, in every operation;
// what arrives whole has the values that it has elsewhere.
#include "lockstep/comm/control/verified_operation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <thread>

#include "lockstep/comm/custom_backend.h"
#include "lockstep/comm/message_fault.h"
#include "lockstep/core/error.h"
#include "tests/comm/control/every_operation.h"
#include "tests/support/says.h"

namespace lockstep::comm {
namespace {

using lockstep::test::every_operation;
using lockstep::test::says;

// LOCKSTEP_FAULT while it lives.
class Fault {
 public:
  explicit Fault(const std::string& entry) { setenv("LOCKSTEP_FAULT", entry.c_str(), 1); }
  ~Fault() { unsetenv("LOCKSTEP_FAULT"); }
};

std::string flip(int rank, int message, int bit = 1234567) {
  return "rank=" + std::to_string(rank) + ",message=" + std::to_string(message) +
         ",action=flip:" + std::to_string(bit);
}

// What each rank says of the damage; empty where it has seen none.
struct Seen {
  std::vector<std::string> texts;
  std::vector<int> senders;
};
Seen run_on(const std::vector<int>& hosts, const std::function<void(const Group&)>& body,
            InitOptions options = {.backend = "gloo"}) {
  Seen seen{std::vector<std::string>(hosts.size()), std::vector<int>(hosts.size(), -1)};
  run_threads(
      static_cast<int>(hosts.size()),
      [&](const Group& group) {
        try {
          body(group);
        } catch (const DamagedData& error) {
          seen.texts[static_cast<size_t>(group.rank())] = error.what();
          seen.senders[static_cast<size_t>(group.rank())] = error.rank();
        }
      },
      options, hosts);
  return seen;
}

TEST(VerifiedOperation, AFlippedBitInAnyPieceIsFoundOnAllRanks) {
  for (const lockstep::test::NamedOperation& operation : every_operation()) {
    // Behind its last piece comes the record of the barrier.
    for (int piece = 1; piece <= operation.pieces + 1; ++piece) {
      SCOPED_TRACE(operation.name + ", piece " + std::to_string(piece));
      const Fault fault(flip(0, piece));
      const Seen seen = run_on({0, 1}, [&](const Group& group) {
        operation.run(group);
        barrier(group).wait();
      });
      const std::string kind = operation.name.substr(0, operation.name.find("_large"));
      for (const std::string& text : seen.texts) {
        EXPECT_THAT(text, says("rank 0 of group 'world' ... rank 1 ... arrived damaged ... bytes"));
        if (piece > operation.pieces) {
          EXPECT_THAT(text, says("[barrier]"));
        } else {
          EXPECT_THAT(text, says("[" + kind.substr(0, kind.find("_uneven")) + "]"));
        }
      }
      EXPECT_THAT(seen.senders, ::testing::Each(1));
    }
  }
}

TEST(VerifiedOperation, TheSenderIsNamedAmongSeveral) {
  const Fault fault(flip(1, 4, 0));  // two records, then the blocks of ranks 0 and 2
  const Seen seen = run_on({0, 0, 1}, [](const Group& group) {
    const at::Tensor whole = at::zeros({3000});
    all_gather(whole, at::ones({1000}), group).wait();
    barrier(group).wait();
  });
  for (const std::string& text : seen.texts) {
    EXPECT_THAT(text,
                says("[all_gather] rank 1 of group 'world' ... operation #1 ... "
                     "float32[3000] ... data of rank 2 ... rank 2 of the job ... 4000 bytes"));
  }
  EXPECT_THAT(seen.senders, ::testing::Each(2));
}

TEST(VerifiedOperation, ADroppedOperationBreaksTheGroupToo) {
  const Fault fault(flip(0, 2));
  const Seen seen = run_on({0, 1}, [](const Group& group) {
    const at::Tensor whole = at::zeros({20});
    {
      const Work dropped = all_gather(whole, at::ones({10}), group);
      while (!dropped.done()) std::this_thread::yield();
    }
    barrier(group).wait();
  });
  for (const std::string& text : seen.texts) EXPECT_THAT(text, says("[all_gather] ... rank 1"));
}

// The ranks of a group that users never see have other numbers.
TEST(VerifiedOperation, StrategiesNameTheSender) {
  const Fault fault(flip(1, 5));  // three records, then one of the group across hosts, and its data
  const Seen seen = run_on({0, 0, 1, 1},
                           [](const Group& group) {
                             for (int call = 0; call < 10; ++call)
                               all_reduce(at::ones({1000}), group).wait();
                           },
                           {.backend = "gloo", .strategy = CommStrategy::hierarchical});
  EXPECT_THAT(seen.texts[1], says("by hierarchical failed ... arrived damaged"));
  EXPECT_EQ(seen.senders[1], 3);
}

TEST(VerifiedOperation, UnharmedResultsHaveTheBitsOfTheEngine) {
  const auto results = [](bool check, const std::vector<int>& hosts) {
    std::vector<std::vector<at::Tensor>> all(hosts.size());
    run_threads(
        static_cast<int>(hosts.size()),
        [&](const Group& group) {
          for (const lockstep::test::NamedOperation& operation : every_operation())
            all[static_cast<size_t>(group.rank())].push_back(operation.run(group));
        },
        {.backend = "gloo", .check = check}, hosts);
    return all;
  };
  const auto expected = results(false, {0, 1});
  for (const auto& actual : {results(true, {0, 1}), results(true, {0, 0})}) {
    for (size_t rank = 0; rank < 2; ++rank) {
      for (size_t i = 0; i < every_operation().size(); ++i)
        EXPECT_TRUE(at::equal(actual[rank][i], expected[rank][i])) << every_operation()[i].name;
    }
  }
}

// Of one and of two steps, in every dtype: the tree over ranks that shared memory has.
TEST(VerifiedOperation, SumsAreTheTreeOverRanks) {
  const std::vector<int> hosts{0, 0, 1};
  for (const auto type : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kInt, at::kBool}) {
    for (const int64_t count : {int64_t{0}, int64_t{1}, int64_t{100}, int64_t{50'001}}) {
      for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg, ReduceOp::max}) {
        if (type == at::kBool && op == ReduceOp::avg) continue;
        const auto sums = [&](const std::string& backend) {
          std::vector<at::Tensor> all(hosts.size());
          run_threads(
              3,
              [&](const Group& group) {
                const at::Tensor data = at::arange(count, at::kDouble)
                                            .mul_(0.37 + group.rank())
                                            .sin_()
                                            .mul_(100)
                                            .to(type);
                all_reduce(data, group, {.op = op}).wait();
                all[static_cast<size_t>(group.rank())] = data;
              },
              {.backend = backend}, hosts);
          return all;
        };
        const at::Tensor expected = sums("thread")[0];
        for (const at::Tensor& sum : sums("gloo"))
          EXPECT_TRUE(at::equal(sum, expected)) << c10::toString(type) << ' ' << count;
      }
    }
  }
}

TEST(VerifiedOperation, GroupsThatSpanHostsPassTheConformanceChecks) {
  for (const ConformanceCheck& check : conformance_checks()) {
    SCOPED_TRACE(check.name);
    EXPECT_NO_THROW(run_threads(3, check.run, {.backend = "gloo"}, {0, 0, 1}));
  }
}

TEST(VerifiedOperation, NothingIsComparedWhereItIsSwitchedOffOrInsideAHost) {
  const auto body = [](const Group& group) {
    for (int call = 0; call < 3; ++call) {
      const at::Tensor sum = at::ones({1000});
      all_reduce(sum, group).wait();
      EXPECT_EQ(sum[999].item<float>(), 2);
    }
  };
  const Fault fault(flip(0, 1));
  for (const auto& [check, hosts] :
       std::vector<std::pair<bool, std::vector<int>>>{{false, {0, 1}}, {true, {0, 0}}}) {
    const Seen seen = run_on(hosts, body, {.backend = "gloo", .check = check});
    EXPECT_THAT(seen.texts, ::testing::Each(""));
  }
}

TEST(MessageFault, FlipsOneBitOfOnePiece) {
  const auto fault =
      detail::MessageFault::parse("step=3,rank=1,action=kill;rank=1,message=2,action=flip:19", 1);
  ASSERT_TRUE(fault);
  std::vector<std::byte> piece(2), nothing;
  fault->apply(piece);
  fault->apply(nothing);
  EXPECT_EQ(piece, std::vector<std::byte>(2));
  fault->apply(piece);
  EXPECT_EQ(piece[0], std::byte{1 << 3});  // 19 modulo 16
  EXPECT_EQ(piece[1], std::byte{0});
  fault->apply(piece);
  EXPECT_EQ(piece[0], std::byte{1 << 3});
  EXPECT_FALSE(detail::MessageFault::parse("rank=1,message=2,action=flip:19", 0));
  EXPECT_FALSE(detail::MessageFault::parse("rank=0,step=2,action=stop", 0));
}

TEST(MessageFault, RefusesWhatItCannotRead) {
  for (const std::string bad :
       {"message=2", "rank=0,message=0,action=flip:1", "rank=0,message=two,action=flip:1",
        "rank=0,message=2,action=flip:", "rank=0,message=2,action=drop",
        "rank=-1,message=2,action=flip:1", "rank=0,message=2,action=flip:1,step=3",
        "rank=0,rank=1,message=2,action=flip:1", "rank=0,message,action=flip:1",
        "rank=0,message=99999999999999999999,action=flip:1"}) {
    try {
      (void)detail::MessageFault::parse(bad, 7);
      ADD_FAILURE() << bad;
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), says("LOCKSTEP_FAULT ... '" + bad + "' ... rank=R,message=N"));
    }
  }
  const Fault fault("rank=0,message=x,action=flip:1");
  EXPECT_THROW(run_threads(2, [](const Group&) {}), ConfigError);
}

}  // namespace
}  // namespace lockstep::comm
