// SPDX-License-Identifier: Apache-2.0
// The NCCL backend on a fake of NCCL and CUDA: results, failures, memory, adoption.
#include "lockstep/comm/backends/nccl/nccl.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <mutex>
#include <thread>

#include "lockstep/comm/backends/nccl/adopt.h"
#include "lockstep/comm/backends/nccl/devices.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/conformance/conformance.h"
#include "lockstep/core/error.h"
#include "tests/comm/backends/nccl/fake_nccl.h"
#include "tests/comm/unfinished_group.h"
#include "tests/support/sampling.h"
#include "tests/support/says.h"

namespace lockstep::comm {
namespace {

using lockstep::test::says;
using std::chrono::milliseconds;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class Nccl : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    // "fake" has been added by main(), in overlap_test.cpp.
    detail::add_backend({"old", [] { return true; }, nccl::factory(fake::old_engine(), "old")});
  }
  void SetUp() override { fake::take_calls(); }
  void TearDown() override {
    for (const int rank : {0, 1}) fake::set_async_error(rank, nccl::Result::success);
    fake::fail_calls_of("");
  }

  static void run(int ranks, const std::function<void(const Group&)>& body,
                  InitOptions options = {.check = false}) {
    if (options.backend == "auto") options.backend = "fake";
    run_threads(ranks, body, options);
  }
};

TEST_F(Nccl, PassesTheConformanceChecks) {
  for (const int ranks : {1, 2, 3, 4}) {
    if (ranks % 2 == 0 && !lockstep::test::tests_all()) continue;
    run(ranks,
        [](const Group& world) {
          at::set_num_threads(1);
          for (const ConformanceCheck& check : conformance_checks()) {
            const Group group = world.split(0, world.rank());
            EXPECT_NO_THROW(check.run(group)) << check.name;
            barrier(world).wait();
          }
        },
        {.check = true, .force_backend_on_single_rank = true});
  }
}

TEST_F(Nccl, WorldsOneAfterAnotherSeeNothingOfEachOther) {
  const int cycles = lockstep::test::tests_all() ? 1000 : 20;
  for (int cycle = 0; cycle < cycles; ++cycle) {
    run(3, [&](const Group& world) {
      at::Tensor sum = at::full({5}, 100 * cycle + world.rank(), at::kLong);
      all_reduce(sum, world).wait();
      EXPECT_EQ(sum[4].item<int64_t>(), 300 * cycle + 3);
    });
  }
}

TEST_F(Nccl, SumsInTheOrderOfTheTreeWhereThatIsAsked) {
  for (const int ranks : {2, 3, 4}) {
    for (const auto type : {at::kFloat, at::kBFloat16, at::kLong}) {
      for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg, ReduceOp::max}) {
        const auto part = [&](int rank) {
          return at::arange(1001, at::kDouble).mul_(0.37 + rank).sin_().mul_(1e3).to(type);
        };
        at::Tensor expected;
        run_threads(ranks, [&](const Group& group) {
          const at::Tensor data = part(group.rank());
          all_reduce(data, group, {.op = op}).wait();
          if (group.rank() == 0) expected = data;
        });
        run(ranks, [&](const Group& group) {
          const at::Tensor data = part(group.rank());
          all_reduce_ordered(data, group, {.op = op}).wait();
          EXPECT_TRUE(at::equal(data, expected));
          std::vector<int64_t> counts(static_cast<size_t>(ranks), 1001 / ranks);
          counts.back() += 1001 % ranks;
          const int64_t mine = counts[static_cast<size_t>(group.rank())];
          const at::Tensor block = at::empty({mine}, type);
          reduce_scatter_ordered(block, part(group.rank()), group, {.op = op, .counts = counts})
              .wait();
          EXPECT_TRUE(
              at::equal(block, expected.narrow(0, int64_t{1001} / ranks * group.rank(), mine)));
        });
      }
    }
  }
}

TEST_F(Nccl, ALateRankIsNamedAtTheDeadline) {
  std::mutex mutex;
  std::condition_variable changed;
  bool over = false;
  run(2, [&](const Group& group) {
    all_reduce(at::ones({4}), group).wait();  // connects
    if (group.rank() == 1) {
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return over; });
      EXPECT_THROW(all_reduce(at::ones({4}), group).wait(), CommError);
      return;
    }
    std::string message;
    try {
      all_reduce(at::ones({4}), group, {.timeout = milliseconds{300}, .tag = "late"}).wait();
    } catch (const TimeoutError& error) {
      message = error.what();
    }
    EXPECT_THAT(message, HasSubstr("[all_reduce] rank 0 of group 'world': operation #2 "
                                   "all_reduce(float32[4], sum, tag 'late') has waited 0."));
    EXPECT_THAT(message, says("rank 1 ... finished all_reduce #1 ... deadline"));
    EXPECT_THROW(all_reduce(at::ones({4}), group).wait(), TimeoutError);
    const std::lock_guard lock(mutex);
    over = true;
    changed.notify_all();
  });
  EXPECT_EQ(fake::count(fake::take_calls(), "abort"), 2);
}

TEST_F(Nccl, ALostRankEndsWhatWaitsForIt) {
  run(2, [&](const Group& group) {
    all_reduce(at::ones({4}), group).wait();
    barrier(group).wait();
    if (group.rank() == 1) {
      detail::impl_of(group).membership().world->store->set(launch::lost_key(1),
                                                            "killed by signal 9");
      return;
    }
    for (const bool again : {false, true}) {
      try {
        recv(at::ones({4}), 1, group).wait();
        FAIL() << "a message of a lost rank arrived";
      } catch (const PeerLost& error) {
        EXPECT_EQ(error.rank(), 1);
        EXPECT_THAT(error.what(), HasSubstr("rank 1 is lost (killed by signal 9), while operation "
                                            "#1 recv(float32[4], from 1) was running"))
            << again;
      }
    }
    // The collectives' communicator is gone too.
    EXPECT_THROW(all_reduce(at::ones({4}), group).wait(), PeerLost);
  });
  EXPECT_GE(fake::count(fake::take_calls(), "abort"), 1);
}

TEST_F(Nccl, AnErrorThatNcclFindsBreaksTheGroupOnAllRanks) {
  run(2, [&](const Group& group) {
    all_reduce(at::ones({4}), group).wait();
    if (group.rank() == 1) fake::set_async_error(1, nccl::Result::remote_error);
    std::string message;
    try {
      // Rank 0 is elsewhere, and hears of it from rank 1.
      if (group.rank() == 1) all_reduce(at::ones({4}), group).wait();
      barrier(group).wait();
    } catch (const CommError& error) {
      message = error.what();
    }
    EXPECT_THAT(message, HasSubstr("NCCL: remote process exited"));
  });
  EXPECT_GE(fake::count(fake::take_calls(), "abort"), 2);
}

TEST_F(Nccl, ACallThatFailsIsToldInItsWords) {
  run(2, [&](const Group& group) {
    const at::Tensor data = at::ones({4});
    broadcast(data, group).wait();
    if (group.rank() == 0) fake::fail_calls_of("all_reduce");
    barrier(group).wait();
    std::string message;
    try {
      all_reduce(data, group).wait();
    } catch (const CommError& error) {
      message = error.what();
    }
    EXPECT_THAT(message, HasSubstr("operation #2 all_reduce(float32[4], sum) failed: NCCL: "
                                   "internal error"));
  });
}

// They would act on host memory alone.
TEST_F(Nccl, StrategiesAreRefused) {
  using layout::CommStrategy;
  for (const auto strategy : {CommStrategy::ring, CommStrategy::tree, CommStrategy::hierarchical,
                              CommStrategy::adaptive}) {
    std::string message;
    try {
      run_threads(2, [](const Group&) {}, {.backend = "fake", .strategy = strategy, .check = false},
                  {0, 1});
    } catch (const ConfigError& error) {
      message = error.what();
    }
    EXPECT_THAT(message, HasSubstr("strategy " + std::string(layout::name_of(strategy))));
    EXPECT_THAT(message, HasSubstr("nccl"));
  }
  run(2, [](const Group& group) {
    EXPECT_THROW((void)group.with_strategy(CommStrategy::ring), ConfigError);
  });
}

TEST_F(Nccl, AnotherDeviceIsRefused) {
  run(2, [](const Group& group) {
    at::Tensor data = at::ones({4});
    all_reduce(data, group).wait();
    EXPECT_THROW(
        detail::impl_of(group).submit({.kind = fabric::OpKind::all_reduce, .device = 1}, nullptr),
        ConfigError);
  });
}

TEST_F(Nccl, MemoryLivesUntilTheOperationIsOver) {
  run(2, [](const Group& group) {
    std::weak_ptr<int> dropped, waited, in_finish;
    const auto submit = [&](const std::shared_ptr<int>& memory, at::Tensor& data) {
      const auto written_last = std::make_shared<int>();
      in_finish = written_last;
      return detail::impl_of(group).submit(
          {.kind = fabric::OpKind::all_reduce,
           .dtype = DType::float32,
           .input = {static_cast<std::byte*>(data.data_ptr()), data.nbytes()},
           .output = {static_cast<std::byte*>(data.data_ptr()), data.nbytes()},
           .count = data.numel(),
           .device = 0,
           .finish = [written_last] { ++*written_last; }},
          memory);
    };
    at::Tensor data = at::ones({4}), other = at::ones({4});
    {
      const auto memory = std::make_shared<int>(), later = std::make_shared<int>();
      waited = memory;
      const auto pending = submit(memory, data);
      dropped = later;
      if (group.rank() == 0) submit(later, other);
      pending->wait();
    }
    // By the thread that watches, soon after.
    const auto is_freed = [](const std::weak_ptr<int>& memory) {
      for (const Deadline deadline(milliseconds{5000}); !memory.expired() && !deadline.passed();)
        std::this_thread::yield();
      return memory.expired();
    };
    EXPECT_TRUE(is_freed(waited));
    // Rank 0 waits for rank 1 there.
    EXPECT_EQ(dropped.expired(), group.rank() == 1);
    if (group.rank() == 0) {
      EXPECT_FALSE(in_finish.expired());
    }
    barrier(group).wait();
    if (group.rank() == 1) submit(std::make_shared<int>(), other)->wait();
    barrier(group).wait();
    if (group.rank() == 0) {
      EXPECT_TRUE(is_freed(dropped));
      EXPECT_TRUE(is_freed(in_finish));
    }
    EXPECT_EQ(other[0].item<float>(), 2);
  });
}

TEST_F(Nccl, WhatHostsExchangeLivesUntilItIsOver) {
  auto world = std::make_shared<detail::World>(detail::World{.hosts = {0}});
  world->store = std::make_shared<launch::LocalStore>();
  world->force_backend_on_single_rank = true;
  std::vector<test::UnfinishedGroup::Used> used;
  world->host_backend = "unfinished";
  world->adopted = {"unfinished", [] { return true; },
                    [&](detail::Membership membership) {
                      return std::make_shared<test::UnfinishedGroup>(std::move(membership), used);
                    }};
  const Group group(nccl::factory(fake::engine(), "fake")({"world", 0, {0}, world}));
  EXPECT_THROW(all_reduce(at::ones({4}), group).wait(), TimeoutError);
  ASSERT_EQ(used.size(), 1);
  EXPECT_EQ(used[0].operation.tag, "NCCL id");
  EXPECT_EQ(used[0].memory.use_count(), 1);
}

TEST_F(Nccl, SymmetricMemoryIsNcclsAndRegistered) {
  for (const bool connected : {false, true}) {
    run(2, [&](const Group& group) {
      if (connected) all_reduce(at::ones({1}), group).wait();
      const std::vector<int64_t> large{1 << 20}, small{10};
      const at::Tensor data = symmetric_empty(large, DType::float32, group).fill_(1);
      all_reduce(data, group).wait();
      EXPECT_EQ(data[5].item<float>(), 2);
      EXPECT_TRUE(is_symmetric(data, group));
      EXPECT_TRUE(is_symmetric(data.narrow(0, 1000, 1000), group));
      EXPECT_EQ(symmetric_empty(small, DType::float32, group).numel(), 10);
    });
    const auto calls = fake::take_calls();
    for (const char* function : {"mem_alloc", "register", "deregister", "mem_free"})
      EXPECT_EQ(fake::count(calls, function), 2) << function;
    EXPECT_EQ(calls.back().function == "destroy" || calls.back().function == "abort", true);
  }
  run(2,
      [&](const Group& group) {
        const std::vector<int64_t> large{1 << 20};
        EXPECT_EQ(symmetric_empty(large, DType::float32, group).numel(), 1 << 20);
      },
      {.backend = "old", .check = false});
  EXPECT_THAT(fake::take_calls(), IsEmpty());
}

TEST_F(Nccl, AdoptsACommunicator) {
  const nccl::Engine engine = fake::engine();
  nccl::UniqueId id{};
  engine.api->get_unique_id(&id);
  fake::take_calls();
  run_threads(2, [&](const Group& host) {
    ncclComm* comm = nullptr;
    nccl::Config config;
    engine.api->comm_init_rank_config(&comm, 2, id, host.rank(), &config);
    barrier(host).wait();
    {
      const Group group(nccl::adopt(engine, comm, detail::shared_impl_of(host)));
      EXPECT_EQ(group.backend(), "nccl");
      const at::Tensor data = at::ones({4});
      all_reduce(data, group).wait();
      EXPECT_EQ(data[0].item<float>(), 2);
    }
    EXPECT_THROW(nccl::adopt(engine, comm, detail::shared_impl_of(Group())), ConfigError);
    barrier(host).wait();
    engine.api->comm_destroy(comm);
  });
  const auto calls = fake::take_calls();
  EXPECT_EQ(fake::count(calls, "init"), 2);
  EXPECT_EQ(fake::count(calls, "destroy"), 2);  // ours, above
  EXPECT_EQ(fake::count(calls, "abort"), 0);
}

TEST_F(Nccl, OnlyAnAdoptedCommunicatorThatBlocksHasToBeWaitedFor) {
  const nccl::Engine engine = fake::engine();
  nccl::UniqueId id{};
  engine.api->get_unique_id(&id);
  run_threads(2,
              [&](const Group& host) {
                ncclComm* comm = nullptr;
                nccl::Config config;
                engine.api->comm_init_rank_config(&comm, 2, id, host.rank(), &config);
                barrier(host).wait();
                if (host.rank() == 0) fake::hold_calls_of("all_reduce");
                const Group group(
                    nccl::adopt(engine, comm, detail::shared_impl_of(host.split(0, host.rank()))));
                std::vector<std::jthread> threads;
                if (host.rank() == 0) {
                  threads.emplace_back(
                      [&] { EXPECT_THROW(all_reduce(at::ones({4}), group).wait(), CommError); });
                  fake::wait_for_held_call();
                  threads.emplace_back([&] { detail::impl_of(group).abort("enough"); });
                } else {
                  try {
                    barrier(group).wait();
                    ADD_FAILURE() << "nothing was thrown";
                  } catch (const CommError& error) {
                    EXPECT_THAT(error.what(), HasSubstr("enough"));
                  }
                }
                barrier(host).wait();
                fake::hold_calls_of("");
              },
              {.backend = "thread", .check = false});  // ranks call different things
}

TEST_F(Nccl, TheWatchingThreadDoesNotFreeMemory) {
  std::mutex mutex;
  std::condition_variable changed;
  enum { used, freeing, may_end, ended } stage = used;
  const auto go_to = [&](auto next) {
    const std::lock_guard lock(mutex);
    stage = next;
    changed.notify_all();
  };
  const auto wait_for = [&](auto which) {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, milliseconds{10'000}, [&] { return stage >= which; });
  };
  run(2, [&](const Group& group) {
    const at::Tensor data = at::ones({4});
    const std::span<std::byte> bytes(static_cast<std::byte*>(data.data_ptr()), data.nbytes());
    const auto submit = [&](std::shared_ptr<void> memory) {
      return detail::impl_of(group).submit({.kind = fabric::OpKind::all_reduce,
                                            .dtype = DType::float32,
                                            .input = bytes,
                                            .output = bytes,
                                            .count = data.numel(),
                                            .device = 0},
                                           std::move(memory));
    };
    if (group.rank() == 1) {
      submit(nullptr)->wait();
      EXPECT_TRUE(wait_for(ended));
      return;
    }
    // Nobody waits for it, so its memory is the stream's.
    (void)submit({bytes.data(), [&](void*) {
                    go_to(freeing);
                    EXPECT_TRUE(wait_for(may_end));
                    go_to(ended);
                  }});
    EXPECT_TRUE(wait_for(freeing));
    EXPECT_THROW(all_reduce(at::ones({4}), group, {.timeout = milliseconds{300}}).wait(),
                 TimeoutError);
    go_to(may_end);
    EXPECT_TRUE(wait_for(ended));
  });
}

TEST_F(Nccl, IsAbsentWithoutHarm) {
  if (nccl::cuda_runtime() != nullptr) {
    EXPECT_EQ(has_backend("nccl"), nccl::problem().empty());
    return;
  }
  EXPECT_FALSE(has_backend("nccl"));
  try {
    init({.backend = "nccl"});
    FAIL() << "a build without CUDA made a group of nccl";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), says("backend 'nccl' ... no CUDA ... auto, shm ... PRESET=cuda"));
  }
  EXPECT_THROW(nccl::adopt(nullptr, Group()), ConfigError);
  // The library is there or it is not, and then that is said.
  const nccl::Library& library = nccl::library();
  EXPECT_NE(library.api == nullptr, library.problem.empty());
  if (library.api == nullptr) {
    EXPECT_THAT(library.problem,
                AnyOf(HasSubstr("libnccl.so.2 was not found"), says("at least 21400")));
  } else {
    EXPECT_GE(library.version, 21400);
  }
}

TEST(NcclDevices, EveryRankNeedsOneOfItsOwn) {
  using Devices = std::vector<std::vector<std::string>>;
  const std::vector<int> two_hosts{0, 0, 1, 1}, one_host{0, 0};
  const std::vector<std::string> both{"a", "b"};
  EXPECT_EQ(nccl::problem_of(two_hosts, Devices(4, both)), "");
  // Each rank may see its own alone.
  EXPECT_EQ(nccl::problem_of(one_host, {{"a"}, {"b"}}), "");
  EXPECT_EQ(nccl::problem_of(two_hosts, {{"a"}, {"b"}, {"a"}, {"b"}}), "");
  EXPECT_THAT(nccl::problem_of(one_host, {{"a"}, {"a"}}), says("ranks 0 and 1 ... CUDA device 0"));
  EXPECT_EQ(nccl::problem_of(one_host, {{"a"}, {"a"}}, /*may_share=*/true), "");
  EXPECT_THAT(nccl::problem_of(std::vector<int>{0, 0, 0}, Devices(3, both)),
              says("ranks 0 and 2 ... CUDA device 0"));
  EXPECT_EQ(nccl::problem_of(two_hosts, {both, both, both, {}}),
            "rank 3 cannot use NCCL or has no CUDA device");
}

TEST(NcclDevices, AllRanksHearOneAnswer) {
  const std::vector<int> hosts{0, 0};
  const Deadline deadline(milliseconds{5000});
  for (const std::string devices : {"a b", "a", ""}) {
    launch::LocalStore store;
    for (const char* key : {"device/0", "device/1"}) store.set(key, devices);
    const std::string answer = nccl::agree_on_devices(store, 0, hosts, deadline);
    EXPECT_EQ(answer.empty(), devices == "a b");
    EXPECT_EQ(nccl::agree_on_devices(store, 1, hosts, deadline), answer);
  }
  launch::LocalStore store;
  nccl::publish_devices(store, 1);
  EXPECT_EQ(store.find("device/1")->empty(), !nccl::problem().empty());
}

}  // namespace
}  // namespace lockstep::comm
