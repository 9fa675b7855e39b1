// SPDX-License-Identifier: Apache-2.0
// Ranks of `lockstep train -n` that die, stop, hang or are slow: what is said, and how the run goes
// on.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>

#include "tests/train/train_command.h"

namespace lockstep::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class Restart : public Train {
 protected:
  Result run_with(const std::string& fault, const Words& options) const {
    return lockstep_command(command(options), {"LOCKSTEP_FAULT=" + fault});
  }
  const Words two_{"-n",
                   "2",
                   "--train.steps",
                   "12",
                   "--checkpoint.every",
                   "3",
                   "--comm.timeout",
                   "60",
                   "--train.threads",
                   "1"};
};

TEST_F(Restart, ContinuesFromItsOwnCheckpointWithTheSameBits) {
  const auto plain = steps_of_processes("plain", two_);
  const Result result =
      run_with("rank=1,step=8,action=kill", two_ + Words{"--run.max_restarts", "2"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("rank 1 (pid "));
  EXPECT_THAT(result.out, HasSubstr("step-00000006 at step 6"));
  EXPECT_EQ(losses(read_steps(path("metrics.jsonl"))), losses(plain));
}

// Before there is a checkpoint it begins again.
TEST_F(Restart, AStoppedRankIsReplaced) {
  const auto plain = steps_of_processes("plain", two_);
  const Result result =
      run_with("rank=0,step=2,action=stop", two_ + Words{"--run.max_restarts", "1"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.err, AllOf(HasSubstr("rank 0 (pid "), HasSubstr("SIGSTOP")));
  EXPECT_EQ(losses(read_steps(path("metrics.jsonl"))), losses(plain));
}

TEST_F(Restart, ACrashLoopEndsWithItsOwnCode) {
  const Result result =
      run_with("rank=1,step=5,action=exit:9,start=each", two_ + Words{"--run.max_restarts", "20"});
  EXPECT_EQ(result.code, 93) << result.err;
  EXPECT_THAT(result.err, HasSubstr("beyond step 4"));
}

TEST_F(Restart, NeedsTheRanksToBeItsOwn) {
  expect_refused({"--run.max_restarts", "2"}, "run.max_restarts 2 ... -n");
  expect_refused({"-n", "2", "--run.grace", "-1"}, "run.grace ... -1");
}

TEST_F(Restart, ALateRankIsNamedWithItsStacksAndASlowOneWithItsTime) {
  std::string faults = "rank=1,step=4,action=sleep:5";
  for (int step = 6; step < 12; ++step)
    faults += ";rank=0,step=" + std::to_string(step) + ",action=sleep:0.3";
  const Result result =
      run_with(faults, two_ + Words{"--run.dir", path("run"), "--checkpoint.every", "0"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.err, AllOf(HasSubstr("rank 1 is late"), HasSubstr("after step 3"),
                                HasSubstr("nanosleep")));
  EXPECT_THAT(result.err, AllOf(HasSubstr("rank 0 (pid "), HasSubstr(" is slow")));
  // The run has finished; of that moment only the dumps tell.
  std::filesystem::create_directory(path("dumps"));
  std::filesystem::rename(path("run") + "/attempt_0", path("dumps") + "/attempt_0");
  const Result report = lockstep_command({"report", path("dumps"), "--text"});
  EXPECT_EQ(report.code, 0) << report.err;
  EXPECT_THAT(report.out, HasSubstr("rank 1 left the common order first"));
}

TEST_F(Restart, AnySignalSavesAtAnyTimeAndSaysWhatItDid) {
  for (const int signal : {SIGTERM, SIGUSR1, SIGHUP}) {
    for (const bool saves : {true, false}) {
      const std::string folder = path((saves ? "saves" : "none") + std::to_string(signal));
      Subprocess job(Words{LOCKSTEP_COMMAND} +
                     command({"-n", "2", "--train.steps", "1000000", "--train.threads", "1",
                              "--checkpoint.dir", saves ? folder : ""}));
      // One of them comes while the ranks start.
      EXPECT_TRUE(eventually([&] {
        return signal == SIGHUP ? !job.others().empty()
                                : job.out().find("step ") != std::string::npos;
      }));
      job.kill(signal);
      const Result result = job.wait();
      EXPECT_EQ(result.code, 75) << result.err;
      EXPECT_THAT(result.last_line(), HasSubstr(saves ? "saved step" : "nothing was saved"));
      EXPECT_EQ(std::filesystem::exists(folder), saves);
    }
  }
}

}  // namespace
}  // namespace lockstep::test
