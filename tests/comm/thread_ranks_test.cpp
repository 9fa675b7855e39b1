// SPDX-License-Identifier: Apache-2.0
// The conformance checks with threads as ranks, for every backend that can have them.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/conformance/conformance.h"
#include "lockstep/core/error.h"
#include "tests/support/sampling.h"

namespace lockstep::comm {
namespace {

struct RankCase {
  std::string backend;
  int ranks;
};

class ThreadRanks : public ::testing::TestWithParam<RankCase> {};

TEST_P(ThreadRanks, PassTheConformanceChecks) {
  const auto& [backend, ranks] = GetParam();
  for (const ConformanceCheck& check : conformance_checks()) {
    SCOPED_TRACE(check.name);
    try {
      run_threads(ranks, check.run, {.backend = backend, .check = true});
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
  }
}

// Worlds one after another: each sees data of its own, and nothing of what another has left.
TEST(ThreadWorlds, StartAgainAndAgain) {
  const int cycles = lockstep::test::tests_all() ? 1000 : 20;
  for (const char* backend : {"thread", "shm", "gloo"}) {
    for (int cycle = 0; cycle < cycles; ++cycle) {
      run_threads(3,
                  [&](const Group& world) {
                    at::Tensor sum = at::full({5}, 100 * cycle + world.rank(), at::kLong);
                    all_reduce(sum, world).wait();
                    EXPECT_EQ(sum[4].item<int64_t>(), 300 * cycle + 3) << backend;
                  },
                  {.backend = backend});
    }
  }
}

std::vector<RankCase> rank_cases() {
  std::vector<RankCase> all;
  for (const char* backend : {"thread", "shm", "gloo"}) {
    for (const int ranks : {1, 2, 3, 4, 8}) {
      // `lockstep selftest` tries shm and gloo with processes as ranks.
      if ((backend == std::string("thread") && ranks != 2) || lockstep::test::tests_all())
        all.push_back({backend, ranks});
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(, ThreadRanks, ::testing::ValuesIn(rank_cases()), [](const auto& info) {
  return info.param.backend + std::to_string(info.param.ranks);
});

}  // namespace
}  // namespace lockstep::comm
