// SPDX-License-Identifier: Apache-2.0
// What ends a group: operations that do not match, ranks that leave, die or are late, and memory
// that cannot be read.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <thread>

#include "lockstep/core/error.h"
#include "tests/fabric/world.h"
#include "tests/support/says.h"

namespace lockstep::fabric::testing {
namespace {

using test::says;
using ::testing::HasSubstr;

class Faults : public ::testing::TestWithParam<Memory> {};

Operation all_reduce(std::vector<float>& data) {
  return {.kind = OpKind::all_reduce,
          .dtype = DType::float32,
          .input = bytes(data),
          .output = bytes(data),
          .count = static_cast<int64_t>(data.size())};
}

TEST_P(Faults, DifferentOperationsFailEverywhereAndShowBothSides) {
  const auto errors = run_ranks(GetParam(), 3, [](Member& me) {
    std::vector<float> data(me.rank == 1 ? 5 : 4);
    me.run(all_reduce(data));
  });
  for (const auto& error : errors) {
    EXPECT_TRUE(is<MismatchError>(error));
    EXPECT_THAT(what(error), HasSubstr("ranks 0, 2 called all_reduce(float32[4], sum); rank 1 "
                                       "called all_reduce(float32[5], sum)"));
  }
}

TEST_P(Faults, TagRootDtypeAndReductionAreCompared) {
  const std::vector<std::function<void(Operation&)>> changes{
      [](Operation& op) { op.tag = "bucket1"; }, [](Operation& op) { op.root = 1; },
      [](Operation& op) { op.dtype = DType::int32; },
      [](Operation& op) { op.reduce = ReduceOp::max; },
      [](Operation& op) { op.kind = OpKind::all_reduce; }};
  for (const auto& change : changes) {
    const auto errors = run_ranks(GetParam(), 2, [&](Member& me) {
      std::vector<float> data(4);
      Operation op = all_reduce(data);
      op.kind = OpKind::reduce;
      op.root = 0;
      op.tag = "bucket0";
      if (me.rank == 1) change(op);
      me.run(op);
    });
    for (const auto& error : errors) EXPECT_TRUE(is<MismatchError>(error)) << what(error);
  }
}

TEST_P(Faults, AllToAllBlocksMustMatch) {
  const auto errors = run_ranks(GetParam(), 2, [](Member& me) {
    std::vector<float> in(4), out(4);
    Operation op{.kind = OpKind::all_to_all,
                 .dtype = DType::float32,
                 .input = bytes(in),
                 .output = bytes(out),
                 .send_counts = {2, 2},
                 .recv_counts = {2, 2}};
    if (me.rank == 1) op.send_counts = {3, 1};
    me.run(op);
  });
  for (const auto& error : errors)
    EXPECT_THAT(what(error), HasSubstr("rank 1 sends 3 elements to rank 0, which expects 2"));
}

TEST_P(Faults, MessagesOfDifferentSizesFailAtBothEnds) {
  const auto errors = run_ranks(GetParam(), 2, [](Member& me) {
    std::vector<float> data(me.rank == 0 ? 4 : 8);
    if (me.rank == 0) {
      me.run({.kind = OpKind::send,
              .dtype = DType::float32,
              .root = 1,
              .input = bytes(data),
              .count = 4});
    } else {
      me.run({.kind = OpKind::recv,
              .dtype = DType::float32,
              .root = 0,
              .output = bytes(data),
              .count = 8});
    }
    me.run({.kind = OpKind::barrier});
  });
  for (const auto& error : errors) {
    EXPECT_TRUE(is<MismatchError>(error)) << what(error);
    EXPECT_THAT(
        what(error),
        HasSubstr(
            "rank 1 called recv(float32[8], from 0), but rank 0 called send(float32[4], to 1)"));
  }
}

TEST_P(Faults, ARankThatLeavesIsNamedWithItsLastOperation) {
  const auto errors = run_ranks(GetParam(), 3, [](Member& me) {
    me.run({.kind = OpKind::barrier});
    std::vector<float> data(100'000);
    if (me.rank != 2) me.run(all_reduce(data));
  });
  EXPECT_FALSE(errors[2]);
  for (const int rank : {0, 1}) {
    EXPECT_TRUE(is<PeerLost>(errors[static_cast<size_t>(rank)]));
    EXPECT_THAT(what(errors[static_cast<size_t>(rank)]), HasSubstr("rank 2"));
    EXPECT_THAT(what(errors[static_cast<size_t>(rank)]),
                says("has left ... operation #2 all_reduce(float32[100000], sum)"));
    EXPECT_THAT(what(errors[static_cast<size_t>(rank)]),
                HasSubstr("rank 2 has finished barrier #1"));
  }
}

TEST_P(Faults, ALateRankIsATimeoutForEverybodyThatWaits) {
  std::atomic<int> given_up{0};
  const auto errors = run_ranks(GetParam(), 3,
                                [&](Member& me) {
                                  me.run({.kind = OpKind::barrier});
                                  std::vector<float> data(10);
                                  Operation op = all_reduce(data);
                                  op.timeout = milliseconds{200};
                                  if (me.rank == 1) {
                                    while (given_up < 2)
                                      std::this_thread::yield();  // alive, but never comes
                                    return;
                                  }
                                  try {
                                    me.run(op);
                                  } catch (...) {
                                    ++given_up;
                                    throw;
                                  }
                                },
                                {.warn_after = milliseconds{50}});
  for (const int rank : {0, 2}) {
    EXPECT_TRUE(is<TimeoutError>(errors[static_cast<size_t>(rank)]));
    EXPECT_THAT(what(errors[static_cast<size_t>(rank)]),
                says("rank 1 ... finished barrier #1 ... deadline"));
  }
}

TEST_P(Faults, AProbeThatKnowsOfADeathEndsTheWait) {
  std::atomic<int> survivors{0};
  const auto errors = run_ranks(
      GetParam(), 2,
      [&](Member& me) {
        if (me.rank == 1) {
          while (survivors == 0) std::this_thread::yield();
          return;
        }
        try {
          me.run({.kind = OpKind::barrier});
        } catch (...) {
          ++survivors;
          throw;
        }
      },
      {.probe = [](int rank) { return rank == 1 ? std::string("was killed") : std::string(); }});
  EXPECT_TRUE(is<PeerLost>(errors[0]));
  EXPECT_THAT(what(errors[0]), HasSubstr("was killed"));
}

TEST_P(Faults, ABrokenGroupStaysBroken) {
  run_ranks(GetParam(), 2, [](Member& me) {
    std::vector<float> data(me.rank == 1 ? 5 : 4);
    EXPECT_THROW(me.run(all_reduce(data)), MismatchError);
    EXPECT_THROW(me.run({.kind = OpKind::barrier}), MismatchError);
  });
}

INSTANTIATE_TEST_SUITE_P(, Faults, ::testing::Values(Memory::threads, Memory::shared),
                         [](const auto& info) {
                           return info.param == Memory::threads ? "threads" : "shared";
                         });

#ifdef __x86_64__
// Only here does the kernel copy large blocks of ordinary memory, from the second all_to_all on.
// Where a sandbox forbids that, they are staged.
TEST(KernelCopy, WhatCannotBeReadFailsOnEveryRank) {
  static constexpr size_t kBytes = 3 << 20;
  uint32_t word = 1, copy = 0;
  const iovec to{&copy, sizeof(copy)}, from{&word, sizeof(word)};
  const bool allowed = process_vm_readv(getpid(), &to, 1, &from, 1, 0) == sizeof(word);
  const auto errors = run_ranks(Memory::shared, 3, [&](Member& me) {
    const std::unique_ptr<void, void (*)(void*)> memory(
        mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0),
        [](void* data) { munmap(data, kBytes); });
    const std::span<std::byte> data(static_cast<std::byte*>(memory.get()), kBytes);
    std::vector<std::byte> out(kBytes);
    const std::vector<int64_t> counts(3, kBytes / sizeof(float) / 3);
    const Operation op{.kind = OpKind::all_to_all,
                       .dtype = DType::float32,
                       .input = data,
                       .output = out,
                       .send_counts = counts,
                       .recv_counts = counts};
    me.run(op);
    if (me.rank == 1 && allowed) mprotect(memory.get(), kBytes / 3, PROT_NONE);  // for rank 0
    me.run(op);
  });
  for (const auto& error : errors) {
    if (allowed) {
      EXPECT_THAT(what(error), says("all_to_all #2 ... rank 1's input"));
    } else {
      EXPECT_EQ(what(error), "");
    }
  }
}
#endif

TEST(Board, IsOpenedByItsOwnIncarnationOnly) {
  const auto board = Board::create(2, true, 41);
  EXPECT_NO_THROW(Board::open(board->handle(), 2, 41));
  try {
    Board::open(board->handle(), 2, 42);
    ADD_FAILURE() << "a board of another incarnation was opened";
  } catch (const CommError& error) {
    EXPECT_THAT(error.what(), HasSubstr("incarnation 0000000000000029 of the job"));
  }
}

}  // namespace
}  // namespace lockstep::fabric::testing
