// SPDX-License-Identifier: Apache-2.0
// Jobs that continue with fewer ranks after some have failed, and with more again later.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>

#include "lockstep/launch/places.h"
#include "tests/support/says.h"
#include "tests/support/subprocess.h"

namespace lockstep::test {
namespace {

using launch::Places;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using Ints = std::vector<int>;

const Clock::time_point kStart{};

TEST(Places, ThatFailAreLeftOutForATimeThatDoubles) {
  Places places({2, 4}, seconds{60}, {});
  EXPECT_EQ(places.next(kStart).places, (Ints{0, 1, 2, 3}));
  EXPECT_FALSE(places.next(kStart).grows_at);
  places.fail({1}, kStart);
  EXPECT_EQ(places.next(kStart).places, (Ints{0, 2, 3}));
  EXPECT_EQ(places.next(kStart).grows_at, kStart + seconds{60});
  places.fail({3}, kStart + seconds{10});
  EXPECT_EQ(places.next(kStart + seconds{10}).places, (Ints{0, 2}));
  EXPECT_EQ(places.next(kStart + seconds{60}).places, (Ints{0, 1, 2}));
  EXPECT_EQ(places.next(kStart + seconds{60}).grows_at, kStart + seconds{70});
  places.fail({1}, kStart + seconds{80});
  EXPECT_EQ(places.next(kStart + seconds{199}).places, (Ints{0, 2, 3}));
  EXPECT_EQ(places.next(kStart + seconds{200}).places, (Ints{0, 1, 2, 3}));
  for (int i = 0; i < 100; ++i) places.fail({1}, kStart);
  EXPECT_EQ(places.next(kStart + seconds{100}).grows_at, kStart + seconds{3600});
}

TEST(Places, AllComeBackWhereTooFewAreLeft) {
  Places places({3, 4}, seconds{60}, {});
  places.fail({0}, kStart);
  places.fail({1}, kStart);
  EXPECT_EQ(places.next(kStart).places, (Ints{0, 1, 2, 3}));
  Places fixed({4, 4}, seconds{60}, {});
  fixed.fail({2}, kStart);
  EXPECT_EQ(fixed.next(kStart).places, (Ints{0, 1, 2, 3}));
}

TEST(Places, OnlyNumbersThatTheProgramCanUseAreStarted) {
  Places places({2, 4}, seconds{60}, {{2, {2, "two"}}, {3, {2, "two"}}, {4, {4, "four"}}});
  places.fail({0}, kStart);
  EXPECT_EQ(places.next(kStart).places, (Ints{1, 2}));
  EXPECT_EQ(places.next(kStart).layout, "two");
  places.fail({2}, kStart + seconds{1});  // an idle place takes over
  EXPECT_EQ(places.next(kStart + seconds{1}).places, (Ints{1, 3}));
  EXPECT_EQ(places.next(kStart + seconds{1}).grows_at, kStart + seconds{61});  // not with three
}

TEST(Places, ThatAreAbsentAreNotUsed) {
  Places places({1, 3}, seconds{60}, {});
  places.set_present(2, false);
  EXPECT_EQ(places.next(kStart).places, (Ints{0, 1}));
  places.fail({2}, kStart);
  EXPECT_FALSE(places.next(kStart).grows_at);
  places.set_present(2, true);
  EXPECT_EQ(places.next(kStart).grows_at, kStart + seconds{60});
  places.set_present(0, false);
  places.set_present(1, false);
  EXPECT_THAT(places.next(kStart).places, IsEmpty());
}

// As `lockstep run -n 2:4`.
Result run_elastic(const std::string& script, const std::vector<std::string>& options = {}) {
  std::vector<std::string> argv = run_script(4, script, options);
  *std::find(argv.begin(), argv.end(), "4") = "2:4";
  return Subprocess(argv).wait();
}

TEST(Elastic, ContinuesWithThePlacesWhoseRanksDidNotFail) {
  const Result result = run_elastic(
      "echo $LOCKSTEP_GENERATION: $RANK $LOCAL_RANK of $WORLD_SIZE $LOCAL_WORLD_SIZE "
      "$LOCKSTEP_MAX_WORLD_SIZE, $LOCKSTEP_WORLD_CHANGE; test $LOCKSTEP_GENERATION = 0 || exit 0; "
      "test $RANK != 2 || kill -9 $$; sleep 1000",
      {"--max-restarts", "2", "--grow-after", "900"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("0: 3 3 of 4 4 4,\n"));
  for (const std::string rank : {"0", "1", "2"})
    EXPECT_THAT(result.out, HasSubstr("1: " + rank + " " + rank + " of 3 3 4, -1 4 rank 2\n"));
  EXPECT_THAT(result.err, says("rank 2 ... SIGKILL"));
  EXPECT_THAT(result.err, says("3 of 4 ranks ... rank 2 (restart 1 of 2) ... 900 s"));
}

// A rank that leaves because it misses another is not lost; of those that a signal ends, each is.
TEST(Elastic, TwoThatDieAtOnceAreBothLeftOut) {
  const TempDir dir;
  const std::string gone = dir.path() + "/gone";
  const Result result = run_elastic(
      "test $LOCKSTEP_GENERATION = 0 || { echo again $WORLD_SIZE; exit 0; }; "
      "test $RANK != 1 || { touch " +
          gone + "; kill -9 $$; }; until test -e " + gone +
          "; do sleep 0.01; done; test $RANK != 3 || kill -9 $$; test $RANK = 0 && exit 1; "
          "sleep 1000",
      {"--max-restarts", "2", "--grace", "2000"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, AllOf(HasSubstr("[rank1]: again 2"), Not(HasSubstr("[rank2]: again"))));
}

TEST(Elastic, BelowTheSmallestNumberAllStartAgain) {
  const Result result = run_elastic(
      "echo run $LOCKSTEP_GENERATION of $WORLD_SIZE; case $LOCKSTEP_GENERATION in 3) exit 0;; "
      "esac; "
      "test $RANK != 0 || exit 6; sleep 1000",
      {"--max-restarts", "5"});
  EXPECT_THAT(result.out,
              AllOf(HasSubstr("run 1 of 3"), HasSubstr("run 2 of 2"), HasSubstr("run 3 of 4")));
  EXPECT_EQ(result.code, 0) << result.err;
}

TEST(Elastic, CodesThatForbidARestartAndTheBudgetHold) {
  EXPECT_EQ(run_elastic("test $RANK != 1 || exit 2; sleep 1000", {"--max-restarts", "5"}).code, 2);
  const Result loop = run_elastic("test $RANK != 1 || exit 9; sleep 1000", {"--max-restarts", "1"});
  EXPECT_EQ(loop.code, 9);
  EXPECT_THAT(loop.err, HasSubstr("as many as --max-restarts allows"));
}

TEST(Elastic, GrowsAgainWhenTheRanksHaveStopped) {
  const Result result = run_elastic(
      "echo run $LOCKSTEP_GENERATION of $WORLD_SIZE, $LOCKSTEP_WORLD_CHANGE; "
      "case $LOCKSTEP_GENERATION in 0) test $RANK != 1 || exit 6; sleep 1000;; 2) exit 0;; esac; "
      "trap 'exit 75' TERM; while :; do sleep 0.01; done",
      {"--max-restarts", "1", "--grow-after", "1"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out,
              AllOf(HasSubstr("[rank2]: run 1 of 3"), HasSubstr("[rank3]: run 2 of 4, -1 3\n")));
  EXPECT_THAT(result.err, says("4 of 4 ranks ... 3 were"));
}

// Nobody is killed so that there are more.
TEST(Elastic, RanksThatCannotStopTrainOn) {
  const Result result = run_elastic(
      "echo run $LOCKSTEP_GENERATION; test $LOCKSTEP_GENERATION != 0 -o $RANK != 1 || exit 6; "
      "test $LOCKSTEP_GENERATION != 0 || sleep 1000; sleep 2",
      {"--max-restarts", "1", "--grow-after", "1"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, AllOf(HasSubstr("run 1"), Not(HasSubstr("run 2"))));
}

TEST(Elastic, AStopWhileItGrowsIsAStop) {
  const TempDir dir;
  const std::string asked = dir.path() + "/asked", go = dir.path() + "/go";
  std::vector<std::string> argv =
      run_script(4,
                 "case $LOCKSTEP_GENERATION in 0) test $RANK != 1 || exit 6; sleep 1000;; esac; "
                 "trap 'touch " +
                     asked + "; until test -e " + go +
                     "; do sleep 0.01; done; exit 75' TERM; "
                     "while :; do sleep 0.01; done",
                 {"--max-restarts", "1", "--grow-after", "1"});
  *std::find(argv.begin(), argv.end(), "4") = "2:4";
  Subprocess job(argv);
  ASSERT_TRUE(eventually([&] { return access(asked.c_str(), F_OK) == 0; }));
  job.kill(SIGTERM);
  write_file(go, "");
  const Result result = job.wait();
  EXPECT_EQ(result.code, 75) << result.err;
  EXPECT_THAT(result.last_line(), says("stopped by SIGTERM"));
}

TEST(Elastic, BadBoundsAreOneLine) {
  const auto refused = [](std::vector<std::string> options, const std::string& message) {
    options.insert(options.begin(), "run");
    options.push_back("true");
    const Result result = lockstep_command(options);
    EXPECT_EQ(result.code, 2);
    EXPECT_THAT(result.err, says(message));
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  };
  refused({"-n", "4:2", "--max-restarts", "1"}, "-n 4:2 ... MIN 4 ... MAX 2");
  refused({"-n", "0:2", "--max-restarts", "1"}, "-n 0:2 ... MIN is 0 ... at least 1");
  refused({"-n", "2:x"}, "-n ... 2:x ... MIN:MAX");
  refused({"-n", "2:"}, "-n ... 2: ... MIN:MAX");
  refused({"-n", "2:4"}, "-n 2:4 ... --max-restarts");
  refused({"-n", "2:4", "--max-restarts", "1", "--grow-after", "0"},
          "--grow-after 0 ... at least 1");
  refused({"-n", "2:4", "--max-restarts", "1", "--nnodes", "2", "--rendezvous", "h:1"},
          "-n 2:4 ... --nnodes 2 ... -n 4");
  refused({"-n", "1", "--nnodes", "3:2", "--max-restarts", "1"},
          "--nnodes 3:2 ... MIN 3 ... MAX 2");
}

}  // namespace
}  // namespace lockstep::test
