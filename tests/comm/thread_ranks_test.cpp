// The conformance checks with threads as ranks, for every backend that can have them.
#include <gtest/gtest.h>

#include <string>

#include "lockstep/comm/conformance.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

struct Case {
  std::string backend;
  int ranks;
};

class ThreadRanks : public ::testing::TestWithParam<Case> {};

TEST_P(ThreadRanks, Conform) {
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

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const char* backend : {"thread", "shm", "gloo"}) {
    for (const int ranks : {1, 2, 3, 4, 8}) all.push_back({backend, ranks});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(, ThreadRanks, ::testing::ValuesIn(cases()), [](const auto& info) {
  return info.param.backend + std::to_string(info.param.ranks);
});

}  // namespace
}  // namespace lockstep::comm
