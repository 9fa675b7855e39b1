// SPDX-License-Identifier: Apache-2.0
// Traces of two ranks become one, in which each arrow has both ends.
#include "lockstep/report/trace.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "lockstep/core/format.h"
#include "tests/support/subprocess.h"

namespace lockstep::report {
namespace {

using nlohmann::json;

std::string slice(const char* category, const char* name, int rank, int row, double start,
                  double end, const std::string& args) {
  return format(
      R"({{"ph":"X","cat":"{}","name":"{}","pid":{},"tid":{},"ts":{},"dur":{},"args":{{{}}}}})",
      category, name, rank, row, start, end - start, args);
}

std::string clock(int rank, int64_t offset) {
  return format(
      R"({{"ph":"M","name":"process_name","pid":{},"args":{{"name":"rank {}","wall_offset_us":{}}}}})",
      rank, rank, offset);
}

TEST(MergedTrace, HasAFlowForEachMessageAndWait) {
  const test::TempDir folder;
  // Rank 1 is on a host whose clock is 5 s behind; its last line is torn.
  const std::string group = R"("group":"pp","peer":)";
  test::write_file(folder.path() + "/run1-rank0.json",
                   "[\n" + clock(0, 10'000'000) + ",\n" +
                       slice("comm", "send", 0, 2, 100, 150, group + "1,\"ticket\":7") + ",\n" +
                       slice("comm", "send", 0, 2, 200, 260, group + "1,\"ticket\":8") + ",\n" +
                       slice("wait", "wait", 0, 1, 210, 260, "\"ticket\":8") + "\n]\n");
  test::write_file(folder.path() + "/run1-rank1.json",
                   "[\n" + clock(1, 5'000'000) + ",\n" +
                       slice("comm", "recv", 1, 2, 5'000'090, 5'000'151, group + "0") + ",\n" +
                       std::string("{\"ph\":\"X\",\"ca"));
  const auto files = trace_files(folder.path());
  ASSERT_EQ(files.size(), 1u);
  ASSERT_EQ(files[0].size(), 2u);
  std::ostringstream out;
  const TraceCounts counts = merge_traces(files[0], out);
  EXPECT_EQ(counts.messages, 1);
  EXPECT_EQ(counts.waits, 1);
  const json events = json::parse(out.str());
  std::map<int64_t, std::vector<json>> flows;
  std::map<std::pair<int, int>, std::vector<std::pair<double, double>>> slices;
  for (const json& event : events) {
    if (event["ph"] == "X")
      slices[{event["pid"], event["tid"]}].push_back(
          {event["ts"], event["ts"].get<double>() + event["dur"].get<double>()});
    if (event["ph"] == "s" || event["ph"] == "f") flows[event["id"]].push_back(event);
  }
  EXPECT_EQ(flows.size(), 2u);
  for (const auto& [id, ends] : flows) {
    ASSERT_EQ(ends.size(), 2u);
    EXPECT_EQ(ends[0]["ph"], "s");
    EXPECT_EQ(ends[1]["ph"], "f");
    EXPECT_LE(ends[0]["ts"].get<double>(), ends[1]["ts"].get<double>());
    for (const json& end : ends) {
      const auto& row = slices[{end["pid"], end["tid"]}];
      EXPECT_TRUE(std::any_of(row.begin(), row.end(), [&](const auto& each) {
        return each.first <= end["ts"].get<double>() && end["ts"].get<double>() <= each.second;
      })) << end;
    }
  }
  // Both ranks are on one clock.
  EXPECT_EQ(slices.at({1, 2})[0].first, 90);
}

TEST(MergedTrace, OfAFolderWithoutTracesIsNone) {
  const test::TempDir folder;
  EXPECT_TRUE(trace_files(folder.path()).empty());
  EXPECT_TRUE(trace_files(folder.path() + "/gone").empty());
}

}  // namespace
}  // namespace lockstep::report
