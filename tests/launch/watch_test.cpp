// SPDX-License-Identifier: Apache-2.0
// What the launcher sees of its ranks, and when it starts them again.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>

#include "lockstep/launch/restart_policy.h"
#include "lockstep/launch/watch/process_state.h"
#include "tests/support/subprocess.h"

namespace lockstep::launch {
namespace {

using test::eventually;
using test::Result;
using test::run_script;
using test::Subprocess;
using testing::HasSubstr;

Outcome failed(int64_t step, int64_t ran_ms = 1000) {
  return {Outcome::Kind::failed, 9, true, "", step, ran_ms};
}

TEST(RestartPolicy, NothingIsRestartedThatWouldNotHelp) {
  RestartPolicy policy(5);
  EXPECT_FALSE(policy.after({}).restart);
  EXPECT_FALSE(policy.after({Outcome::Kind::stopped, 75, true, ""}).restart);
  EXPECT_FALSE(policy.after({Outcome::Kind::failed, 2, false, ""}).restart);
  EXPECT_FALSE(RestartPolicy(0).after(failed(3)).restart);
}

TEST(RestartPolicy, ThreeRestartsWithoutProgressAreEnough) {
  RestartPolicy policy(20);
  milliseconds before{-1};
  for (int i = 0; i < 3; ++i) {
    const auto decision = policy.after(failed(3));
    EXPECT_TRUE(decision.restart) << i;
    EXPECT_GT(decision.wait, before) << "each waits longer";
    before = decision.wait;
  }
  const auto last = policy.after(failed(3));
  EXPECT_FALSE(last.restart);
  EXPECT_EQ(last.code, 93);
}

TEST(RestartPolicy, ProgressStartsTheCountAgain) {
  RestartPolicy policy(20);
  for (const int64_t step : {3, 3, 3, 4, 4, 4, 10}) {
    EXPECT_TRUE(policy.after(failed(step)).restart) << step;
  }
}

TEST(RestartPolicy, ProgramsWithoutStepsMakeProgressByRunning) {
  RestartPolicy policy(20);
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(policy.after(failed(-1, 61'000)).restart) << i;
}

TEST(RestartPolicy, TheBudgetIsThatOfAnHour) {
  RestartPolicy policy(2);
  EXPECT_TRUE(policy.after(failed(1)).restart);
  EXPECT_TRUE(policy.after(failed(2)).restart);
  EXPECT_FALSE(policy.after(failed(3)).restart);
  RestartPolicy slow(2);
  for (int64_t step = 1; step < 8; ++step)
    EXPECT_TRUE(slow.after(failed(step, 1'900'000)).restart) << step;
}

TEST(Watch, ACrashLoopEnds) {
  const Result result =
      Subprocess(run_script(2, "echo run; exit 5", {"--max-restarts", "20"})).wait();
  EXPECT_EQ(result.code, 93);
  size_t runs = 0;
  for (size_t at = result.out.find("run"); at != std::string::npos;
       at = result.out.find("run", at + 1))
    ++runs;
  EXPECT_EQ(runs, 8u) << "four starts of two ranks";
}

TEST(Watch, AStoppedRankIsNamed) {
  Subprocess job(run_script(2, "echo $RANK:$$; test $RANK = 0 || kill -STOP $$; sleep 1000"));
  EXPECT_TRUE(eventually([&] { return job.err().find("rank 1 (pid ") != std::string::npos; }));
  EXPECT_THAT(job.err(), HasSubstr("SIGSTOP"));
  job.kill(SIGTERM);
  EXPECT_EQ(job.wait().code, 128 + SIGTERM) << "also the one that is stopped";
}

TEST(Watch, AStoppedRankIsReplacedWhereRestartsAreAllowed) {
  const Result result = Subprocess(run_script(2,
                                              "test $LOCKSTEP_GENERATION = 1 && exit 0; "
                                              "test $RANK = 0 || kill -STOP $$; sleep 1000",
                                              {"--max-restarts", "1"}))
                            .wait();
  EXPECT_EQ(result.code, 0);
  EXPECT_GT(result.seconds, 3);
}

// Somebody suspends the job, and continues it later.
TEST(Watch, RanksThatAreAllStoppedAreLeftAlone) {
  Subprocess job(run_script(2, "kill -STOP $$; echo on", {"--max-restarts", "1"}));
  EXPECT_TRUE(eventually([&] {
    return job.err().find("rank 0 (pid ") != std::string::npos &&
           job.err().find("rank 1 (pid ") != std::string::npos;
  }));
  for (const pid_t process : job.others()) ::kill(process, SIGCONT);
  const Result result = job.wait();
  EXPECT_EQ(result.code, 0);
  EXPECT_THAT(result.out, HasSubstr("on"));
}

TEST(Watch, SigUsr2EndsNobody) {
  Subprocess job(run_script(2, "echo up; read line < /dev/zero & wait; sleep 1000"));
  EXPECT_TRUE(eventually([&] { return !job.out().empty(); }));
  job.kill(SIGUSR2);
  job.kill(SIGUSR2);
  job.kill(SIGTERM);
  EXPECT_EQ(job.wait().code, 128 + SIGTERM);
}

TEST(Watch, RanksThatLeaveTogetherWith75HaveStopped) {
  const Result together = Subprocess(run_script(2, "exit 75", {"--max-restarts", "3"})).wait();
  EXPECT_EQ(together.code, 75);
  // One alone has failed.
  const Result alone = Subprocess(run_script(2, "test $RANK = 0 || exit 75; sleep 1000")).wait();
  EXPECT_EQ(alone.code, 75);
  EXPECT_THAT(alone.last_line(), HasSubstr("rank 1 "));
}

TEST(ProcessState, OfAProcessThatIsStopped) {
  Subprocess job({"sh", "-c", "kill -STOP $$; sleep 1000"});
  EXPECT_TRUE(eventually([&] { return state_of(job.pid()).state == 'T'; }));
  EXPECT_FALSE(state_of(job.pid()).held_on_purpose());
  EXPECT_EQ(state_of(getpid()).state, 'R');
}

}  // namespace
}  // namespace lockstep::launch
