// SPDX-License-Identifier: Apache-2.0
// The command `lockstep report`, as its users meet it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "lockstep/core/rank_env.h"
#include "tests/support/says.h"
#include "tests/support/subprocess.h"

namespace lockstep::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class Report : public testing::Test {
 protected:
  Report() {
    for (const char* const name : {"one", "two"}) {
      std::filesystem::create_directories(folder(name));
      std::string lines;
      for (int i = 1; i <= 5; ++i) {
        lines += "{\"step\":" + std::to_string(i) + ",\"loss\":" + std::to_string(5 - i) +
                 ".5,\"step_ms\":10,\"tokens_per_s\":100,\"busy_ms\":[10,10,90]}\n";
      }
      write_file(folder(name) + "/metrics.jsonl",
                 lines + "{\"step\":5,\"validation_loss\":0.75}\n");
    }
  }
  std::string folder(const std::string& name) const { return folder_.path() + "/" + name; }
  Result refused(const std::vector<std::string>& words) const {
    Result result = lockstep_command(words);
    EXPECT_EQ(result.code, 2) << result.out;
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
    return result;
  }

  const TempDir folder_;
};

TEST_F(Report, WritesAPageAndSaysWhere) {
  const Result result = lockstep_command({"report", folder("one")});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("one/report.html"));
  EXPECT_THAT(read_file(folder("one") + "/report.html"), HasSubstr("</html>"));
  const std::string both = folder("both.html");
  EXPECT_EQ(lockstep_command({"report", folder("one"), folder("two"), "--output", both}).code, 0);
  EXPECT_THAT(read_file(both), HasSubstr("two"));
}

TEST_F(Report, OfAFolderOfRunsIsATable) {
  const Result result = lockstep_command({"report", folder_.path()});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, AllOf(HasSubstr("\none"), HasSubstr("\ntwo"), HasSubstr("0.5000"),
                                HasSubstr("0.7500")));
  EXPECT_EQ(std::count(result.out.begin(), result.out.end(), '\n'), 3);
}

TEST_F(Report, PrintsTextATableOfStepsAndALiveView) {
  const Result text = lockstep_command({"report", folder("one"), "--text"});
  EXPECT_THAT(text.out, AllOf(HasSubstr("0.5000"), HasSubstr("rank 2 is slow")));
  const std::string csv = folder("steps.csv");
  EXPECT_EQ(lockstep_command({"report", folder("one"), "--csv", csv}).code, 0);
  const std::string table = read_file(csv);
  EXPECT_EQ(std::count(table.begin(), table.end(), '\n'), 7);
  EXPECT_THAT(table, AllOf(HasSubstr("step,time,tokens,loss"), HasSubstr("\n3,,,2.5,")));
  // Without a terminal one frame is printed. Rank 2 took nine times as long in five steps.
  const Result frame = lockstep_command({"report", folder("one"), "--watch"});
  EXPECT_EQ(frame.code, 0) << frame.err;
  EXPECT_THAT(frame.out, AllOf(HasSubstr("step 5"), says("rank 2 ... slow ... 90 ms ... 10 ms")));
}

TEST_F(Report, RefusesWithOneLine) {
  EXPECT_THAT(refused({"report", folder("gone")}).err, says("gone ... folder"));
  std::filesystem::create_directories(folder("empty"));
  EXPECT_THAT(refused({"report", folder("empty")}).err, says("config.toml ... metrics.jsonl"));
  EXPECT_THAT(refused({"report", folder("one"), "--trace", folder("t.json")}).err,
              says("traces ... metrics.trace"));
  EXPECT_THAT(refused({"report", folder("one"), folder("two"), "--watch"}).err, says("one ... 2"));
  EXPECT_THAT(refused({"report", folder("one"), "--output", "/dev/null/x.html"}).err,
              says("/dev/null/x.html"));
  EXPECT_THAT(refused({"report", folder_.path(), "--output", folder("x.html")}).err,
              says("several"));
}

}  // namespace
}  // namespace lockstep::test
