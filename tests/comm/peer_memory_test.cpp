#include "lockstep/comm/peer_memory.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <string>

#include "lockstep/comm/collectives.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

at::Tensor shared(int64_t count, const Group& group) {
  const std::array<int64_t, 1> bytes{count * 4};
  return symmetric_empty(bytes, DType::uint8, group).view(at::kFloat);
}

float first_of(const PeerMemory& peers, int rank) {
  return *reinterpret_cast<const float*>(peers.of(rank));
}

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

TEST(PeerMemory, NoSharedMemory) {
  run_threads(2,
              [](const Group& group) {
                check(!PeerMemory::open(at::zeros({8}), group).has_value(), "gloo has none");
                check(!PeerMemory::open(at::zeros({0}), group).has_value(), "gloo has none");
              },
              {.backend = "gloo"});
}

TEST(PeerMemory, FreedByItsOwner) {
  run_threads(2,
              [](const Group& group) {
                at::Tensor mine = shared(1 << 16, group);
                const auto peers = PeerMemory::open(mine, group);
                if (group.rank() == 1) mine.reset();
                barrier(group).wait();
                if (group.rank() == 0) {
                  std::string message;
                  try {
                    peers->of(1);
                  } catch (const PeerLost& lost) {
                    check(lost.rank() == 1, "the rank that freed it");
                    message = lost.what();
                  }
                  check(message.find("rank 1 has freed") != std::string::npos,
                        "freed memory is found out, and the message names the rank");
                }
                barrier(group).wait();  // rank 1 is there until then
              },
              {.backend = "shm"});
}

}  // namespace
}  // namespace lockstep::comm
