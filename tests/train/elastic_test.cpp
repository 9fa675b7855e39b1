// SPDX-License-Identifier: Apache-2.0
// Runs that continue with fewer ranks after some have died, and with all of them again.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "tests/train/train_command.h"

namespace lockstep::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

class ElasticRun : public Train {
 protected:
  static Words elastic(const std::string& ranks, int steps) {
    return {"-n",
            ranks,
            "--train.steps",
            std::to_string(steps),
            "--train.micro_batch",
            "1",
            "--train.global_batch",
            "12",
            "--train.threads",
            "1",
            "--run.max_restarts",
            "5",
            "--checkpoint.every",
            "2",
            "--checkpoint.keep",
            "2"};
  }
  // How many ranks the run had, and what was lost, at each change.
  static std::vector<std::string> worlds(const std::string& folder) {
    std::vector<std::string> found;
    std::istringstream lines(read_file(folder + "/events.jsonl"));
    for (std::string line; std::getline(lines, line);) {
      const json event = json::parse(line);
      if (event["event"] != "world") continue;
      found.push_back(std::to_string(event["from"].get<int>()) + " to " +
                      std::to_string(event["ranks"].get<int>()) + " " +
                      event["lost"].get<std::string>() + ": " + event["layout"].get<std::string>());
    }
    return found;
  }
};

// Continued from copies in memory, and from checkpoints. Rank 0 sleeps until the places of both can
// be used again, which is later than the second loss on a busy machine, too.
TEST_F(ElasticRun, FourRanksThenThreeThenTwoThenFourFollowTheUndisturbedCurve) {
  const Words batch(elastic("4", 20));
  const auto plain = steps("plain", Words(batch.begin() + 2, batch.end() - 6));
  std::map<std::string, Words> ways{
      {"memory", {"--recovery", "memory", "--checkpoint.every", "0"}}};
  if (tests_all()) ways["checkpoint"] = {"--checkpoint.every", "2"};
  for (const auto& [way, options] : ways) {
    SCOPED_TRACE(way);
    const Words in{"--run.dir", path(way), "--checkpoint.dir", "auto", "--metrics.file", "auto"};
    const Result result = lockstep_command(
        command(elastic("2:4", 20) + Words{"--run.grow_after", "12"} + options + in),
        {"LOCKSTEP_FAULT=rank=3,step=4,action=kill,start=each;rank=2,step=6,action=kill,start=each;"
         "rank=0,step=12,action=sleep:13"
         ",start=each"});
    EXPECT_EQ(result.code, 0) << result.err;
    expect_close(losses(read_steps(path(way) + "/metrics.jsonl")), losses(plain), 1e-5);
    EXPECT_THAT(worlds(path(way)),
                ElementsAre("4 to 3 rank 3: dp 3", "3 to 2 rank 2: dp 2", "2 to 4 : dp 4"));
    EXPECT_THAT(result.err, says("3 of 4 ranks ... rank 3 ... dp 3"));
    size_t resumed = 0;
    for (size_t at = 0; (at = result.out.find("resume " + way, at)) != std::string::npos; ++at)
      ++resumed;
    if (way == "memory") {
      EXPECT_EQ(resumed, 3U) << result.out;
    }
    const Result report = lockstep_command({"report", path(way), "--text"});
    EXPECT_EQ(report.code, 0) << report.err;
  }
}

TEST_F(ElasticRun, RefusesBoundsThatCannotWork) {
  expect_refused(elastic("3:2", 4), "-n 3:2 ... MIN 3 ... MAX 2");
  expect_refused(elastic("0:2", 4), "-n ... 0:2 ... at least 1");
  expect_refused({"-n", "2:4"}, "-n 2:4 ... run.max_restarts is 0");
  expect_refused({"--run.min_ranks", "2"}, "run.min_ranks is 2 ... -n 2:MAX");
  expect_refused(elastic("2:4", 4) + Words{"--run.grow_after", "0"}, "run.grow_after ... 0");
}

}  // namespace
}  // namespace lockstep::test
