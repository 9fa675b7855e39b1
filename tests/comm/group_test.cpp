// SPDX-License-Identifier: Apache-2.0
// What the conformance checks do not ask: memory that lives on, tags and deadlines in messages.
#include "lockstep/comm/group.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <thread>

#include "lockstep/comm/backends/gloo/no_sigpipe.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/conformance/conformance.h"
#include "lockstep/core/error.h"
#include "tests/comm/unfinished_group.h"
#include "tests/support/says.h"

namespace lockstep::comm {
namespace {

using lockstep::test::says;
using ::testing::HasSubstr;

TEST(Group, AGroupOfOneDoesNothing) {
  const Group self;
  at::Tensor data = at::arange(6, at::kFloat), copy = at::empty({6});
  all_reduce(data, self).wait();
  broadcast(data, self).wait();
  all_gather(copy, data, self).wait();
  EXPECT_TRUE(at::equal(copy, at::arange(6, at::kFloat)));
  EXPECT_EQ(self.split(3, 0).size(), 1);
  EXPECT_TRUE(Work().done());
}

TEST(Group, AGroupOfOneIsTheBackendsWhereThatIsForced) {
  for (const char* backend : {"thread", "shm", "gloo"}) {
    run_threads(1,
                [&](const Group& group) {
                  EXPECT_EQ(group.backend(), backend);
                  for (const ConformanceCheck& check : conformance_checks())
                    EXPECT_NO_THROW(check.run(group)) << backend << ": " << check.name;
                  EXPECT_EQ(group.split(0, 0).backend(), backend);
                },
                {.backend = backend, .force_backend_on_single_rank = true});
  }
}

TEST(Group, ASplitThatIsGivenUpLeavesItsMemoryToTheBackend) {
  std::vector<test::UnfinishedGroup::Used> used;
  const auto world = std::make_shared<detail::World>(detail::World{.hosts = {0, 0}});
  const Group group(
      std::make_shared<test::UnfinishedGroup>(detail::Membership{"world", 0, {0, 1}, world}, used));
  EXPECT_THROW((void)group.split(0, 0), TimeoutError);
  ASSERT_EQ(used.size(), 1);
  EXPECT_EQ(used[0].memory.use_count(), 1);
}

TEST(Group, FinishedOperationsDoNotHoldTheGroup) {
  for (const char* backend : {"thread", "shm", "gloo"}) {
    run_threads(
        2,
        [&](const Group& group) {
          const auto& impl = detail::shared_impl_of(group);
          const auto before = impl.use_count();
          const int other = 1 - group.rank();
          for (int round = 0; round < 300; ++round) {
            const at::Tensor data = at::ones({4});
            (round % 2 == other ? send(data, other, group) : recv(data, other, group)).wait();
            EXPECT_EQ(impl.use_count(), before) << backend;
          }
        },
        {.backend = backend});
  }
}

// What rank 0 of a group offers must be there for one that comes when rank 0 has given up.
TEST(Group, ALateThreadFindsTheOfferOfARankThatGaveUp) {
  std::atomic<bool> has_given_up{false};
  std::string late_message;
  EXPECT_THROW(run_threads(2,
                           [&](const Group& group) {
                             detail::Membership other = detail::impl_of(group).membership();
                             other.name = "late";
                             other.world = std::make_shared<detail::World>(*other.world);
                             other.world->timeout = milliseconds{50};
                             if (group.rank() == 1) has_given_up.wait(false);
                             try {
                               (void)detail::make_plain_group(other, "thread");
                             } catch (const CommError& error) {
                               if (group.rank() == 1) late_message = error.what();
                               has_given_up = true;
                               has_given_up.notify_all();
                               throw;
                             }
                           }),
               TimeoutError);
  EXPECT_THAT(late_message, HasSubstr("rank 0 of group 'late'"));
}

TEST(Group, AForkedChildThatDropsItsCopyLeavesTheParentIn) {
  for (const char* backend : {"thread", "shm"}) {
    run_threads(2,
                [&](Group group) {
                  const std::vector<int64_t> shape{1'000'000};
                  at::Tensor sum = symmetric_empty(shape, DType::float32, group);
                  sum.fill_(1);
                  barrier(group).wait();
                  if (group.rank() == 1) {
                    const pid_t child = fork();
                    if (child == 0) {
                      alarm(20);
                      sum = at::Tensor();
                      group = Group();
                      _exit(0);
                    }
                    int status = -1;
                    waitpid(child, &status, 0);
                    EXPECT_EQ(status, 0) << backend;
                  }
                  all_reduce(sum, group).wait();
                  EXPECT_EQ(sum[9].item<float>(), 2) << backend;
                },
                {.backend = backend});
  }
}

TEST(Tensors, WhatIsOnlyReadMayBeExpanded) {
  for (const char* backend : {"thread", "shm", "gloo"}) {
    run_threads(3,
                [&](const Group& group) {
                  const bool is_root = group.rank() == 1;
                  const at::Tensor five = at::full({1}, 5.0F).expand({4});
                  const at::Tensor data = is_root ? five : at::zeros({4});
                  broadcast(data, group, {.root = 1}).wait();
                  EXPECT_TRUE(data.eq(5).all().item<bool>()) << backend;
                  const at::Tensor sum = is_root ? at::ones({4}) : five;
                  reduce(sum, group, {.root = 1}).wait();
                  EXPECT_TRUE(sum.eq(is_root ? 11 : 5).all().item<bool>()) << backend;
                },
                {.backend = backend});
  }
}

// Contiguous, but their memory does not hold their values.
TEST(Tensors, NegatedViewsAndLazyZerosAreReadRight) {
  for (const char* backend : {"thread", "shm", "gloo"}) {
    run_threads(2,
                [&](const Group& group) {
                  const at::Tensor minus = at::_neg_view(at::full({4}, 1.0F + group.rank()));
                  all_reduce(minus, group, {.op = ReduceOp::max}).wait();
                  EXPECT_TRUE(minus.eq(-1).all().item<bool>()) << backend;
                  const at::Tensor data =
                      group.rank() == 0 ? at::_neg_view(at::full({4}, 7.0F)) : at::zeros({4});
                  broadcast(data, group).wait();
                  EXPECT_TRUE(data.eq(-7).all().item<bool>()) << backend;
                  const at::Tensor all = at::ones({8});
                  all_gather(all, at::_efficientzerotensor({4}), group).wait();
                  EXPECT_TRUE(all.eq(0).all().item<bool>()) << backend;
                },
                {.backend = backend});
  }
}

TEST(SymmetricMemory, OutlivesItsGroupAndCannotGrow) {
  at::Tensor kept;
  run_threads(2,
              [&](const Group& group) {
                const std::vector<int64_t> shape{10, 3};
                at::Tensor tensor = symmetric_empty(shape, DType::float32, group).fill_(7);
                EXPECT_TRUE(is_symmetric(tensor, group));
                EXPECT_TRUE(is_symmetric(tensor[4], group));
                EXPECT_FALSE(is_symmetric(at::empty({3}), group));
                EXPECT_THROW(tensor.detach().resize_({1000}), c10::Error);
                const Group half = group.split(0, 0);  // memory of a group is memory of its parts
                EXPECT_TRUE(is_symmetric(tensor, half));
                all_reduce(tensor, half).wait();
                if (group.rank() == 0) kept = tensor;
              },
              {.backend = "shm"});
  EXPECT_EQ(kept.min().item<float>(), 14);
  EXPECT_EQ(kept.max().item<float>(), 14);
}

// Lowers the soft limit while it lives.
class FewOpenFiles {
 public:
  explicit FewOpenFiles(rlim_t count) {
    getrlimit(RLIMIT_NOFILE, &before_);
    const rlimit few{count, before_.rlim_max};
    setrlimit(RLIMIT_NOFILE, &few);
  }
  ~FewOpenFiles() { setrlimit(RLIMIT_NOFILE, &before_); }
  rlim_t hard() const { return before_.rlim_max; }

 private:
  rlimit before_{};
};

TEST(SymmetricMemory, BlocksDoNotTakeADescriptorEach) {
  const FewOpenFiles few(256);  // for all ranks together
  run_threads(4,
              [](const Group& group) {
                std::vector<at::Tensor> blocks;
                for (int64_t i = 0; i < 5000; ++i) {
                  const std::vector<int64_t> shape{i % 100 == 0 ? 20'000 : 1 + i % 500};
                  blocks.push_back(symmetric_empty(shape, DType::float32, group)
                                       .fill_(static_cast<double>(i + group.rank())));
                }
                for (size_t i = 0; i < blocks.size(); i += i % 100 == 1 ? 99 : 1) {
                  check(is_symmetric(blocks[i], group), "symmetric memory");
                  all_reduce(blocks[i], group).wait();
                }
                for (size_t i = 0; i < blocks.size(); i += i % 100 == 1 ? 99 : 1) {
                  const auto sum = static_cast<float>(4 * i + 6);
                  check(blocks[i].eq(sum).all().item<bool>(), "the sum of a block");
                }
                barrier(group).wait();
              },
              {.backend = "shm"});
}

TEST(Group, InitRaisesTheNumberOfOpenFiles) {
  const FewOpenFiles few(100);
  (void)init(RankEnv{.rank = 0, .world_size = 1});
  rlimit now{};
  getrlimit(RLIMIT_NOFILE, &now);
  EXPECT_EQ(now.rlim_cur, std::min<rlim_t>(few.hard(), 1 << 20));
}

TEST(SymmetricMemory, NoRoomIsAnError) {
  run_threads(1, [](const Group&) {}, {.backend = "shm"});
  run_threads(2,
              [](const Group& group) {
                const std::vector<int64_t> shape{int64_t{1} << 48};
                try {
                  (void)symmetric_empty(shape, DType::uint8, group);
                  ADD_FAILURE() << "256 TiB were allocated";
                } catch (const SystemError& error) {
                  EXPECT_THAT(error.what(), says("281474976710656 bytes ... shared memory"));
                }
              },
              {.backend = "shm"});
}

TEST(Errors, AWaitEndsAtItsOwnDeadlineAndNamesTheTag) {
  std::atomic<bool> given_up{false};
  try {
    run_threads(2, [&](const Group& group) {
      if (group.rank() == 1) {
        while (!given_up) std::this_thread::yield();
        return;
      }
      at::Tensor data = at::ones({5});
      Work work = all_reduce(data, group, {.timeout = milliseconds{150}, .tag = "bucket7"});
      try {
        work.wait();
      } catch (...) {
        given_up = true;
        throw;
      }
    });
    FAIL() << "nothing was thrown";
  } catch (const TimeoutError& error) {
    EXPECT_THAT(error.what(), HasSubstr("all_reduce(float32[5], sum, tag 'bucket7')"));
    EXPECT_THAT(error.what(), says("rank 1 ... not called"));
  }
}

TEST(Errors, AMessageMayHaveALaterDeadlineThanItsGroup) {
  const milliseconds timeout{3'000};
  for (const char* backend : {"shm", "gloo"}) {
    run_threads(2,
                [&](const Group& group) {
                  const at::Tensor data = at::full({4}, 1.0F - group.rank());
                  const CollectiveOptions later{.timeout = 10 * timeout};
                  if (group.rank() == 0) {
                    std::this_thread::sleep_for(timeout + milliseconds{200});
                    send(data, 1, group, later).wait();
                  } else {
                    EXPECT_NO_THROW(recv(data, 0, group, later).wait()) << backend;
                    EXPECT_EQ(data[3].item<float>(), 1) << backend;
                  }
                },
                {.backend = backend, .timeout = timeout});
  }
}

TEST(Errors, AWriteToALostPeerRaisesNoSigpipe) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  close(ends[0]);
  {
    const gloo::NoSigpipe no_signal;
    EXPECT_EQ(write(ends[1], "x", 1), -1);
    EXPECT_EQ(errno, EPIPE);
    // What was started meanwhile is safe for good.
    std::thread([&] { EXPECT_EQ(write(ends[1], "x", 1), -1); }).join();
  }
  close(ends[1]);
  sigset_t mask;
  pthread_sigmask(SIG_BLOCK, nullptr, &mask);
  EXPECT_EQ(sigismember(&mask, SIGPIPE), 0);
}

TEST(Errors, AThreadRankThatThrowsEndsTheOthers) {
  for (const char* backend : {"thread", "shm", "gloo"}) {
    std::atomic<int> lost{0};
    EXPECT_THROW(run_threads(3,
                             [&](const Group& group) {
                               at::Tensor data = at::ones({5});
                               all_reduce(data, group).wait();
                               if (group.rank() == 1)
                                 throw std::runtime_error("rank 1 has a problem");
                               try {
                                 all_reduce(data, group).wait();
                               } catch (const PeerLost& error) {
                                 EXPECT_EQ(error.rank(), 1) << error.what();
                                 ++lost;
                                 throw;
                               }
                             },
                             {.backend = backend}),
                 std::runtime_error);
    EXPECT_EQ(lost, 2) << backend;
  }
}

}  // namespace
}  // namespace lockstep::comm
