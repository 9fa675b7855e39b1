// SPDX-License-Identifier: Apache-2.0
// Helpers of a rank's large operations: every part runs once, helpers come when they are lent, even
// in the middle, and results have the bits of one thread. Runs under the thread sanitizer too.
#include "lockstep/fabric/crew.h"

#include <gtest/gtest.h>

#include <atomic>
#include <latch>
#include <optional>
#include <stdexcept>
#include <thread>
#include <vector>

#include "tests/fabric/world.h"

namespace lockstep::fabric::testing {
namespace {

TEST(Crew, RunsEachPartOnce) {
  Crew crew;
  for (const int helpers : {0, 1, 3}) {
    const Crew::Loan loan(crew, helpers);
    for (const int64_t parts : {0, 1, 2, 100}) {
      std::vector<std::atomic<int>> runs(static_cast<size_t>(parts));
      crew.run(parts, [&](int64_t i) { ++runs[static_cast<size_t>(i)]; });
      for (const auto& count : runs) EXPECT_EQ(count, 1);
    }
  }
}

TEST(Crew, HelpersAreThere) {
  Crew crew;
  const Crew::Loan loan(crew, 2);
  std::latch together(3);  // no thread can end two of the parts
  crew.run(3, [&](int64_t) { together.arrive_and_wait(); });
}

TEST(Crew, ALoanHelpsWhatRunsAlready) {
  Crew crew;
  std::latch started(1), helped(1);
  const std::jthread driver([&] {
    crew.run(2, [&](int64_t i) {
      if (i == 1) return helped.count_down();
      started.count_down();
      helped.wait();
    });
  });
  started.wait();
  const Crew::Loan loan(crew, 1);
  helped.wait();
}

// Whoever has the part, and after the parts that run already.
TEST(Crew, AFailedPartIsThrownByRun) {
  Crew crew;
  const Crew::Loan loan(crew, 2);
  for (const int64_t bad : {0, 1, 2}) {
    std::latch together(3);
    std::atomic<int> ended = 0;
    const auto part = [&](int64_t i) {
      together.arrive_and_wait();
      if (i == bad) throw std::runtime_error("bad");
      ++ended;
    };
    EXPECT_THROW(crew.run(3, part), std::runtime_error);
    EXPECT_EQ(ended, 2);
    std::atomic<int> runs = 0;
    crew.run(10, [&](int64_t) { ++runs; });  // nothing is left over
    EXPECT_EQ(runs, 10);
  }
}

TEST(Crew, NobodyHelpsWithoutALoan) {
  Crew crew;
  std::optional<Crew::Loan> loan(std::in_place, crew, 3);
  std::latch together(4);
  crew.run(4, [&](int64_t) { together.arrive_and_wait(); });  // all helpers exist
  loan.reset();
  const auto mine = std::this_thread::get_id();
  crew.run(50, [&](int64_t) { EXPECT_EQ(std::this_thread::get_id(), mine); });
}

// A group of one uses all cores; with more ranks on few cores there are no helpers.
TEST(Crew, SharedReductionsHaveTheBitsOfOneThread) {
  const size_t count = (9 << 20) / sizeof(float) + 3;
  for (const int ranks : {1, 2}) {
    std::vector<std::vector<float>> results;
    for (const int threads : {1, 4}) {
      std::vector<float> result;
      const auto body = [&](Member& me) {
        std::vector<float> data(count);
        for (size_t i = 0; i < count; ++i)
          data[i] = 1 / static_cast<float>(i + 2 + static_cast<size_t>(me.rank));
        me.run({.kind = OpKind::all_reduce,
                .reduce = ReduceOp::avg,
                .dtype = DType::float32,
                .input = bytes(data),
                .output = bytes(data),
                .count = static_cast<int64_t>(count)});
        if (me.rank == 0) result = data;
      };
      for (const auto& error :
           run_ranks(Memory::threads, ranks, body, {.threads = [=] { return threads; }}))
        EXPECT_EQ(what(error), "");
      results.push_back(std::move(result));
    }
    EXPECT_EQ(results[0], results[1]);
  }
}

}  // namespace
}  // namespace lockstep::fabric::testing
