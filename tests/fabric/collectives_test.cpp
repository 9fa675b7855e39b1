// SPDX-License-Identifier: Apache-2.0
// The collectives of threads and shared memory, on their own: all sizes around the limits where the
// way data travels changes (eager, staged, direct), checked element by element. Runs under the
// thread sanitizer too.
#include <gtest/gtest.h>

#include <atomic>
#include <numeric>
#include <thread>

#include "tests/fabric/world.h"
#include "tests/support/sampling.h"

namespace lockstep::fabric::testing {
namespace {

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

}  // namespace
}  // namespace lockstep::fabric::testing
