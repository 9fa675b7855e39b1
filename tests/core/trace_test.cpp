// SPDX-License-Identifier: Apache-2.0
#include "lockstep/core/trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "tests/support/subprocess.h"

namespace lockstep {
namespace {

// A process has one trace, so all of it is one test.
TEST(Trace, TheFileSaysWhichRunAndRankItIsOf) {
  const test::TempDir folder;
  const std::string traces = folder.path() + "/traces";
  setenv("LOCKSTEP_TRACE", traces.c_str(), 1);
  { const trace::Span before("test", "before the run is known"); }
  trace::begin_run(0x1234, 3);
  trace::begin_run(0x5678, 4);  // a second comm::init in this process
  { const trace::Span after("test", "after"); }
  trace::flush();
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(traces))
    names.push_back(entry.path().filename().string());
  ASSERT_THAT(names, testing::ElementsAre("run0000000000001234-rank3.json"));
  EXPECT_THAT(test::read_file(traces + "/" + names[0]),
              testing::AllOf(testing::StartsWith("[\n"), testing::EndsWith("]\n"),
                             testing::HasSubstr("before the run is known"),
                             testing::HasSubstr("\"after\"")));
}

}  // namespace
}  // namespace lockstep
