// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/peer_memory.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <string>

#include "lockstep/comm/backend.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/core/error.h"
#include "lockstep/core/system_memory.h"

namespace lockstep::comm {
namespace {

at::Tensor shared(int64_t count, const Group& group) {
  const std::array<int64_t, 1> bytes{count * 4};
  return symmetric_empty(bytes, DType::uint8, group).view(at::kFloat);
}

float first_of(const PeerMemory& peers, int rank) {
  return *reinterpret_cast<const float*>(peers.of(rank));
}

// Rank 1's second gathering, of what is to be held, ends for it only when rank 0 is gone.
class HeldBack {
 public:
  HeldBack(const Group& group, std::atomic<bool>& is_gone)
      : impl_(std::make_shared<Impl>(group, is_gone)) {}
  std::shared_ptr<detail::GroupImpl> impl() const { return impl_; }

 private:
  struct Impl final : detail::GroupImpl {
    Impl(const Group& group, std::atomic<bool>& is_gone)
        : GroupImpl(detail::impl_of(group).membership(), "thread"), inner(group), gone(is_gone) {}
    std::shared_ptr<detail::Pending> submit(fabric::Operation operation,
                                            std::shared_ptr<const void> memory) override {
      const bool holds_back =
          operation.kind == fabric::OpKind::all_gather && ++gatherings == 2 && inner.rank() == 1;
      auto pending = detail::impl_of(inner).submit(std::move(operation), std::move(memory));
      if (holds_back) {
        pending->wait();
        gone.wait(false);
      }
      return pending;
    }
    std::shared_ptr<std::byte> allocate(size_t) override { return nullptr; }
    bool reaches(const void*, size_t) const override { return true; }
    fabric::Location locate(const void* data, size_t bytes) const override {
      return detail::impl_of(inner).locate(data, bytes);
    }

    Group inner;
    std::atomic<bool>& gone;
    int gatherings = 0;
  };
  std::shared_ptr<Impl> impl_;
};

class PeerMemoryOn : public testing::TestWithParam<std::string> {
 protected:
  // Failures of checks are thrown: gtest listens on the main thread only.
  static void run(int ranks, const std::function<void(Group)>& body) {
    run_threads(ranks, body, {.backend = GetParam()});
  }
};

TEST_P(PeerMemoryOn, SymmetricMemoryOfAnySize) {
  run(3, [](const Group& group) {
    const at::Tensor mine = shared(1000 * (1 + group.rank()), group);
    mine.fill_(group.rank() + 1);
    const auto peers = PeerMemory::open(mine, group);
    check(peers.has_value(), "symmetric memory is in reach");
    barrier(group).wait();
    for (int rank = 0; rank < 3; ++rank) {
      const auto* values = reinterpret_cast<const float*>(peers->of(rank));
      for (int64_t i = 0; i < 1000 * (1 + rank); i += 37)
        check(values[i] == static_cast<float>(rank + 1), "the peer's values");
    }
    barrier(group).wait();
    mine.fill_(10 * (group.rank() + 1));
    barrier(group).wait();
    for (int rank = 0; rank < 3; ++rank)
      check(first_of(*peers, rank) == static_cast<float>(10 * (rank + 1)), "what it writes later");
    barrier(group).wait();
  });
}

TEST_P(PeerMemoryOn, PartsOfATensor) {
  run(2, [](const Group& group) {
    const at::Tensor whole = shared(100, group);
    whole.copy_(at::arange(100) + 1000 * group.rank());
    const auto peers = PeerMemory::open(whole.narrow(0, 30 + group.rank(), 10), group);
    check(peers.has_value(), "a part is in reach too");
    barrier(group).wait();
    check(first_of(*peers, 0) == 30 && first_of(*peers, 1) == 1031, "the part's first element");
    barrier(group).wait();
  });
}

TEST_P(PeerMemoryOn, OneRankHasNothing) {
  run(2, [](const Group& group) {
    const at::Tensor mine =
        group.rank() == 0 ? shared(8, group) : at::empty({0}, at::TensorOptions(at::kFloat));
    mine.fill_(5);
    const auto peers = PeerMemory::open(mine, group);
    check(peers.has_value(), "an empty tensor is in reach");
    barrier(group).wait();
    check(first_of(*peers, 0) == 5, "the other's values");
    barrier(group).wait();
  });
}

INSTANTIATE_TEST_SUITE_P(, PeerMemoryOn, testing::Values("thread", "shm"),
                         [](const auto& info) { return info.param; });

TEST(PeerMemory, ThreadsReachAllMemory) {
  run_threads(2, [](const Group& group) {
    const at::Tensor mine = at::full({4}, static_cast<float>(group.rank()));
    const auto peers = PeerMemory::open(mine, group);
    check(peers.has_value() && first_of(*peers, 1) == 1, "ordinary memory of a thread");
    barrier(group).wait();
  });
}

// Nobody may read one-sidedly while others wait for an all-gather.
TEST(PeerMemory, OneUnreachableTensorIsToldToAll) {
  run_threads(3,
              [](const Group& group) {
                const at::Tensor mine = group.rank() == 1 ? at::zeros({8}) : shared(8, group);
                check(!PeerMemory::open(mine, group).has_value(),
                      "ordinary memory is not in reach");
              },
              {.backend = "shm"});
}

TEST(PeerMemory, OfOtherStridesIsRefused) {
  run_threads(2, [](const Group& group) {
    EXPECT_THROW(PeerMemory::open(at::zeros({3, 4}).t(), group), ConfigError);
    EXPECT_THROW(PeerMemory::open(at::Tensor(), group), ConfigError);
  });
}

TEST(PeerMemory, NoSharedMemory) {
  run_threads(2,
              [](const Group& group) {
                check(!PeerMemory::open(at::zeros({8}), group).has_value(), "gloo has none");
                check(!PeerMemory::open(at::zeros({0}), group).has_value(), "gloo has none");
              },
              {.backend = "gloo"});
}

TEST(PeerMemory, AThreadThatGaveUpIsNamed) {
  // Rank 1 has learnt of rank 0's tensor, but takes a share in it only when rank 0 is gone.
  std::atomic<bool> is_gone{false};
  std::string late;
  EXPECT_THROW(run_threads(2,
                           [&](const Group& group) {
                             HeldBack held(group, is_gone);
                             try {
                               const at::Tensor mine = at::full({8}, group.rank() + 1.f);
                               (void)PeerMemory::open(mine, Group(held.impl()));
                             } catch (const Error& error) {
                               if (group.rank() == 1) late = error.what();
                               is_gone = true;
                               is_gone.notify_all();
                               throw;
                             }
                           },
                           {.backend = "thread", .timeout = milliseconds{200}}),
               TimeoutError);
  EXPECT_THAT(late, testing::HasSubstr("rank 0"));
}

// A rank may end its use of a model, and drop it, while others still read.
TEST(PeerMemory, StaysWhereItsOwnerHasFreedIt) {
  const uint64_t before = symmetric_memory();
  run_threads(2,
              [](const Group& group) {
                at::Tensor mine = shared(1 << 16, group).fill_(group.rank() + 1);
                auto peers = PeerMemory::open(mine, group);
                barrier(group).wait();
                if (group.rank() == 1) {
                  peers.reset();
                  mine.reset();
                  // Whatever comes next must not take its place.
                  mine = shared(1 << 16, group).fill_(7);
                }
                barrier(group).wait();
                if (group.rank() == 0) {
                  const auto* theirs = reinterpret_cast<const float*>(peers->of(1));
                  check(std::all_of(theirs, theirs + (1 << 16), [](float x) { return x == 2; }),
                        "the values that it had");
                }
                barrier(group).wait();
              },
              {.backend = "shm"});
  EXPECT_EQ(symmetric_memory(), before);
}

}  // namespace
}  // namespace lockstep::comm
