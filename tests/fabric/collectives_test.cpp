// SPDX-License-Identifier: Apache-2.0
// The collectives of threads and shared memory, on their own: all sizes around the limits where the
// way data travels changes (eager, staged, direct), checked element by element. Runs under the
// thread sanitizer too.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <numeric>
#include <thread>

#include "lockstep/core/error.h"
#include "tests/fabric/world.h"
#include "tests/support/sampling.h"
#include "tests/support/says.h"

namespace lockstep::fabric::testing {
namespace {

using test::says;
using ::testing::HasSubstr;

// The value that rank r puts at place i; small whole numbers, so that sums are exact in any order.
float value(int rank, size_t i) {
  return static_cast<float>((static_cast<size_t>(rank) * 7 + i * 3) % 101);
}

// A buffer in ordinary or in symmetric memory.
class Buffer {
 public:
  Buffer(Member& member, size_t count, bool symmetric) : count_(count) {
    if (symmetric && member.heap != nullptr) {
      block_ = member.heap->allocate(count * sizeof(float));
      data_ = reinterpret_cast<float*>(block_.get());
    } else {
      ordinary_.resize(count);
      data_ = ordinary_.data();
    }
  }
  std::span<float> values() { return {data_, count_}; }
  std::span<std::byte> bytes() { return std::as_writable_bytes(values()); }

 private:
  size_t count_;
  std::vector<float> ordinary_;
  std::shared_ptr<std::byte> block_;
  float* data_;
};

struct Case {
  Memory memory;
  int ranks;
  bool symmetric;
};

class Collectives : public ::testing::TestWithParam<Case> {
 protected:
  void run(const std::function<void(Member&)>& body) {
    for (const auto& error : run_ranks(GetParam().memory, GetParam().ranks, body))
      EXPECT_EQ(what(error), "");
  }
  Buffer buffer(Member& member, size_t count) { return {member, count, GetParam().symmetric}; }
  // One piece of staging holds 65536 floats, an eager buffer 4096.
  const std::vector<size_t> counts_{0, 1, 5, 1023, 4096, 4097, 70'001, 300'000};
};

float sum_of(int ranks, size_t i) {
  float sum = 0;
  for (int rank = 0; rank < ranks; ++rank) sum += value(rank, i);
  return sum;
}

TEST_P(Collectives, AllReduceAndReduce) {
  run([&](Member& me) {
    for (const size_t count : counts_) {
      for (int root = -1; root < me.size; root += 2) {
        Buffer data = buffer(me, count);
        for (size_t i = 0; i < count; ++i) data.values()[i] = value(me.rank, i);
        me.run({.kind = root < 0 ? OpKind::all_reduce : OpKind::reduce,
                .dtype = DType::float32,
                .root = root,
                .input = data.bytes(),
                .output = data.bytes(),
                .count = static_cast<int64_t>(count)});
        const bool result_here = root < 0 || root == me.rank;
        for (size_t i = 0; i < count; ++i) {
          ASSERT_EQ(data.values()[i], result_here ? sum_of(me.size, i) : value(me.rank, i))
              << count << " at " << i;
        }
      }
    }
  });
}

TEST_P(Collectives, Broadcast) {
  run([&](Member& me) {
    for (const size_t count : counts_) {
      const int root = static_cast<int>(count) % me.size;
      Buffer data = buffer(me, count);
      for (size_t i = 0; i < count; ++i) data.values()[i] = value(me.rank, i);
      Operation op{.kind = OpKind::broadcast,
                   .dtype = DType::float32,
                   .root = root,
                   .output = data.bytes(),
                   .count = static_cast<int64_t>(count)};
      if (me.rank == root) op.input = data.bytes();
      me.run(op);
      for (size_t i = 0; i < count; ++i) ASSERT_EQ(data.values()[i], value(root, i));
    }
  });
}

TEST_P(Collectives, UnevenAllGatherAndReduceScatter) {
  run([&](Member& me) {
    for (const size_t count : counts_) {
      std::vector<int64_t> blocks;
      for (int rank = 0; rank < me.size; ++rank)
        blocks.push_back(rank % 3 == 1 ? 0 : static_cast<int64_t>(count) + rank);
      const auto total =
          static_cast<size_t>(std::accumulate(blocks.begin(), blocks.end(), int64_t{0}));
      const auto mine = static_cast<size_t>(blocks[static_cast<size_t>(me.rank)]);
      const auto start = static_cast<size_t>(
          std::accumulate(blocks.begin(), blocks.begin() + me.rank, int64_t{0}));
      Buffer part = buffer(me, mine), whole = buffer(me, total);
      for (size_t i = 0; i < mine; ++i) part.values()[i] = value(me.rank, i);
      me.run({.kind = OpKind::all_gather,
              .dtype = DType::float32,
              .input = part.bytes(),
              .output = whole.bytes(),
              .recv_counts = blocks,
              .count = static_cast<int64_t>(total)});
      size_t at = 0;
      for (int rank = 0; rank < me.size; ++rank) {
        for (int64_t i = 0; i < blocks[static_cast<size_t>(rank)]; ++i)
          ASSERT_EQ(whole.values()[at++], value(rank, static_cast<size_t>(i)));
      }
      for (size_t i = 0; i < total; ++i) whole.values()[i] = value(me.rank, i);
      me.run({.kind = OpKind::reduce_scatter,
              .dtype = DType::float32,
              .input = whole.bytes(),
              .output = part.bytes(),
              .send_counts = blocks,
              .count = static_cast<int64_t>(total)});
      for (size_t i = 0; i < mine; ++i) ASSERT_EQ(part.values()[i], sum_of(me.size, start + i));
    }
  });
}

TEST_P(Collectives, AllToAllGatherScatter) {
  run([&](Member& me) {
    const auto n = static_cast<size_t>(me.size);
    for (const size_t count : counts_) {
      // Rank s sends count + s + 2 d elements to rank d.
      std::vector<int64_t> sends, receives;
      for (int peer = 0; peer < me.size; ++peer) {
        sends.push_back(static_cast<int64_t>(count) + me.rank + 2 * peer);
        receives.push_back(static_cast<int64_t>(count) + peer + 2 * me.rank);
      }
      Buffer out =
          buffer(me, static_cast<size_t>(std::accumulate(sends.begin(), sends.end(), int64_t{0})));
      Buffer in = buffer(
          me, static_cast<size_t>(std::accumulate(receives.begin(), receives.end(), int64_t{0})));
      size_t at = 0;
      for (int to = 0; to < me.size; ++to) {
        for (int64_t i = 0; i < sends[static_cast<size_t>(to)]; ++i)
          out.values()[at++] = value(me.rank * 13 + to, static_cast<size_t>(i));
      }
      me.run({.kind = OpKind::all_to_all,
              .dtype = DType::float32,
              .input = out.bytes(),
              .output = in.bytes(),
              .send_counts = sends,
              .recv_counts = receives});
      at = 0;
      for (int from = 0; from < me.size; ++from) {
        for (int64_t i = 0; i < receives[static_cast<size_t>(from)]; ++i)
          ASSERT_EQ(in.values()[at++], value(from * 13 + me.rank, static_cast<size_t>(i)));
      }

      const int root = me.size - 1;
      Buffer part = buffer(me, count), whole = buffer(me, count * n);
      for (size_t i = 0; i < count; ++i) part.values()[i] = value(me.rank, i);
      Operation gather{.kind = OpKind::gather,
                       .dtype = DType::float32,
                       .root = root,
                       .input = part.bytes(),
                       .count = static_cast<int64_t>(count)};
      if (me.rank == root) gather.output = whole.bytes();
      me.run(gather);
      if (me.rank == root) {
        for (size_t i = 0; i < count * n; ++i)
          ASSERT_EQ(whole.values()[i], value(static_cast<int>(i / count), i % count));
        for (size_t i = 0; i < count * n; ++i) whole.values()[i] = value(3, i);
      }
      Operation scatter{.kind = OpKind::scatter,
                        .dtype = DType::float32,
                        .root = root,
                        .output = part.bytes(),
                        .count = static_cast<int64_t>(count)};
      if (me.rank == root) scatter.input = whole.bytes();
      me.run(scatter);
      for (size_t i = 0; i < count; ++i)
        ASSERT_EQ(part.values()[i], value(3, static_cast<size_t>(me.rank) * count + i));
    }
  });
}

TEST_P(Collectives, MessagesBothWaysAtOnceAndInOrder) {
  run([&](Member& me) {
    const int next = (me.rank + 1) % me.size, previous = (me.rank + me.size - 1) % me.size;
    std::vector<Buffer> sent, received;
    std::vector<std::shared_ptr<Ticket>> tickets;
    for (const size_t count : counts_) {
      sent.push_back(buffer(me, count));
      received.push_back(buffer(me, count));
    }
    // All sends first: none may need the receiver's help to let the receives begin.
    for (size_t k = 0; k < counts_.size(); ++k) {
      for (size_t i = 0; i < counts_[k]; ++i) sent[k].values()[i] = value(me.rank, i + k);
      tickets.push_back(me.engine.submit({.kind = OpKind::send,
                                          .dtype = DType::float32,
                                          .root = next,
                                          .input = sent[k].bytes(),
                                          .count = static_cast<int64_t>(counts_[k])},
                                         nullptr));
    }
    for (size_t k = 0; k < counts_.size(); ++k) {
      tickets.push_back(me.engine.submit({.kind = OpKind::recv,
                                          .dtype = DType::float32,
                                          .root = previous,
                                          .output = received[k].bytes(),
                                          .count = static_cast<int64_t>(counts_[k])},
                                         nullptr));
    }
    for (auto& ticket : tickets) me.engine.wait(*ticket);
    for (size_t k = 0; k < counts_.size(); ++k) {
      for (size_t i = 0; i < counts_[k]; ++i)
        ASSERT_EQ(received[k].values()[i], value(previous, i + k));
    }
  });
}

// Many operations in flight, waited for in the reverse order, beside messages: nothing is lost,
// nothing overtakes.
TEST_P(Collectives, ManyInFlight) {
  run([&](Member& me) {
    std::vector<Buffer> data;
    std::vector<std::shared_ptr<Ticket>> tickets;
    for (size_t k = 0; k < 40; ++k) data.push_back(buffer(me, k % 3 == 0 ? 70'000 : 10 + k));
    for (size_t k = 0; k < data.size(); ++k) {
      for (float& v : data[k].values()) v = value(me.rank, k);
      tickets.push_back(me.engine.submit({.kind = OpKind::all_reduce,
                                          .dtype = DType::float32,
                                          .input = data[k].bytes(),
                                          .output = data[k].bytes(),
                                          .count = static_cast<int64_t>(data[k].values().size())},
                                         nullptr));
    }
    for (size_t k = data.size(); k-- > 0;) {
      me.engine.wait(*tickets[k]);
      for (const float v : data[k].values()) ASSERT_EQ(v, sum_of(me.size, k));
    }
  });
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const int ranks : {1, 2, 3, 4, 8}) {
    if (ranks == 8 && !test::tests_all()) continue;
    all.push_back({Memory::threads, ranks, true});
    all.push_back({Memory::shared, ranks, true});
    all.push_back({Memory::shared, ranks, false});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(, Collectives, ::testing::ValuesIn(cases()), [](const auto& info) {
  const Case& c = info.param;
  return std::string(c.memory == Memory::threads ? "threads"
                     : c.symmetric               ? "symmetric"
                                                 : "staged") +
         std::to_string(c.ranks);
});

// While one thread drives its own message to the end, another submits one and forgets it: the first
// may see it too late, and no thread waits for it.
TEST(Engine, AMessageSubmittedWhileAnotherThreadDrives) {
  std::atomic<bool> arrived{false};
  const auto errors = run_ranks(Memory::threads, 2, [&](Member& me) {
    Buffer data(me, 1, false);
    Operation message{.kind = me.rank == 0 ? OpKind::send : OpKind::recv,
                      .dtype = DType::float32,
                      .root = 1 - me.rank,
                      .input = data.bytes(),
                      .output = data.bytes(),
                      .timeout = milliseconds(5000),
                      .count = 1};
    if (me.rank == 1) {
      me.run(message);
      me.run(message);
      arrived = true;
      return;
    }
    Operation first = message;
    first.finish = [&] { std::thread([&] { me.engine.submit(message, nullptr); }).join(); };
    me.engine.submit(first, nullptr);
    const Deadline deadline(milliseconds(5000));
    while (!arrived && deadline.left().count() > 0) std::this_thread::yield();
    EXPECT_TRUE(arrived);
  });
  for (const auto& error : errors) EXPECT_EQ(what(error), "");
}

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
