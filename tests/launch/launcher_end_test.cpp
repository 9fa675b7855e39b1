// SPDX-License-Identifier: Apache-2.0
// How jobs end: a rank dies, the launcher is told to stop, the launcher is killed. Nothing stays
// behind.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <sstream>

#include "lockstep/core/error.h"
#include "lockstep/launch/rendezvous/socket.h"
#include "tests/support/says.h"
#include "tests/support/subprocess.h"

namespace lockstep::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// The limit users are promised is 1 s; the tests leave room for a machine that is busy with others.
constexpr double kSoon = 4.0;

size_t count(const std::string& text, const std::string& word) {
  size_t found = 0;
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) ++found;
  return found;
}

bool all_printed(const Subprocess& job, const std::string& word, size_t times) {
  return eventually([&] { return count(job.out(), word) >= times; });
}

bool nobody_left(const Subprocess& job) {
  return eventually([&] { return job.others().empty(); });
}

bool is_guard(pid_t pid) {
  return read_file("/proc/" + std::to_string(pid) + "/cmdline").find("__guard") !=
         std::string::npos;
}

pid_t guard_of(pid_t launcher) {
  const std::string folder = "/proc/" + std::to_string(launcher);
  std::istringstream children(
      read_file(folder + "/task/" + std::to_string(launcher) + "/children"));
  for (pid_t child = 0; children >> child;) {
    if (is_guard(child)) return child;
  }
  return -1;
}

// True when nothing can be connected to and the port can be bound again.
bool port_is_free(const launch::HostPort& where) {
  try {
    launch::start_listening(launch::bind_socket(where), where);
    return true;
  } catch (const Error&) {
    return false;
  }
}

TEST(LauncherEnd, ADeadRankTakesTheOthersWithIt) {
  for (const std::string death : {"kill -9 $$", "exit 7"}) {
    Subprocess job(run_script(3, "test $RANK != 2 || " + death + "; sleep 1000"));
    const Result result = job.wait();
    EXPECT_LT(result.seconds, kSoon);
    EXPECT_THAT(result.last_line(), HasSubstr("rank 2 "));
    EXPECT_TRUE(nobody_left(job));
  }
}

TEST(LauncherEnd, RanksThatIgnoreSigtermAndTheirChildrenAreKilled) {
  Subprocess job(run_script(3,
                            "trap '' TERM INT; test $RANK != 1 || kill -9 $$; "
                            "(trap '' TERM; sleep 1000; sleep 1000) & sleep 1000; sleep 1000"));
  const Result result = job.wait();
  EXPECT_EQ(result.code, 137);
  EXPECT_LT(result.seconds, kSoon);
  EXPECT_TRUE(nobody_left(job));
}

TEST(LauncherEnd, AParentThatIgnoresItsChildrenDoesNotBlindTheLauncher) {
  std::vector<std::string> argv = run_script(2, "exit 3");
  argv.insert(argv.begin(), {"env", "--ignore-signal=CHLD"});
  EXPECT_EQ(Subprocess(argv).wait().code, 3);
}

TEST(LauncherEnd, SurvivorsHaveAMomentToSayWhatTheySaw) {
  const Result result =
      Subprocess(run_script(2,
                            "test $RANK != 1 || exit 4; trap 'echo ended in order; exit 1' TERM; "
                            "while :; do sleep 0.01; done"))
          .wait();
  EXPECT_EQ(result.code, 4);
  EXPECT_THAT(result.out, HasSubstr("[rank0]: ended in order"));
}

TEST(LauncherEnd, TheGraceIsAnOption) {
  const Result result =
      Subprocess(
          run_script(2, "test $RANK != 1 || exit 4; trap '' TERM; sleep 1000", {"--grace", "700"}))
          .wait();
  EXPECT_GE(result.seconds, 1.4);
  EXPECT_EQ(result.code, 4);
}

TEST(LauncherEnd, ARankThatIsDoneEarlyEndsNobody) {
  const TempDir dir;
  Subprocess job(run_script(2, "test $RANK = 0 && exit 0; echo waiting; until test -e " +
                                   dir.path() + "/go; do sleep 0.01; done; echo done"));
  ASSERT_TRUE(all_printed(job, "waiting", 1));
  // Longer than any grace: if the early end counted as a death, rank 1 would be gone by now.
  ASSERT_FALSE(eventually([&] { return job.others().empty(); }, milliseconds{800}));
  write_file(dir.path() + "/go", "");
  const Result result = job.wait();
  EXPECT_EQ(result.code, 0);
  EXPECT_THAT(result.out, HasSubstr("[rank1]: done"));
}

TEST(LauncherEnd, WhatARankLeavesRunningEndsWithTheJob) {
  Subprocess job(run_script(2, "sleep 1000 & exit 0"));
  EXPECT_EQ(job.wait().code, 0);
  EXPECT_TRUE(nobody_left(job));
}

TEST(LauncherEnd, KillingTheLauncherLeavesNothing) {
  // Ranks are shells with children of their own, which know nothing of the launcher.
  Subprocess job(run_script(
      3, "(trap '' TERM HUP; sleep 1000) & echo at $LOCKSTEP_RENDEZVOUS $MASTER_PORT ready; wait"));
  ASSERT_TRUE(all_printed(job, "ready", 3));
  ASSERT_GE(job.others().size(), 6u);
  const std::string out = job.out();
  const size_t at = out.find(" at ") + 4;
  const auto rendezvous = launch::parse_host_port(out.substr(at, out.find(' ', at) - at), "test");
  EXPECT_FALSE(port_is_free(rendezvous));
  const auto start = Clock::now();
  job.kill(SIGKILL);
  EXPECT_TRUE(nobody_left(job));
  EXPECT_LT(seconds_since(start), kSoon);
  EXPECT_TRUE(eventually([&] { return port_is_free(rendezvous); }));
  EXPECT_EQ(job.wait().code, 137);
}

TEST(LauncherEnd, TheGuardEndsWithTheJob) {
  const TempDir dir;
  for (const bool killed : {false, true}) {
    Subprocess job(
        run_script(1, "echo ready; until test -e " + dir.path() + "/go; do sleep 0.01; done"));
    ASSERT_TRUE(all_printed(job, "ready", 1));
    const pid_t guard = guard_of(job.pid());
    ASSERT_GT(guard, 0);
    // Neither a terminal nor a careless kill ends it early.
    const std::string status = read_file("/proc/" + std::to_string(guard) + "/status");
    const auto ignored = std::stoull(status.substr(status.find("SigIgn:") + 7), nullptr, 16);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP}) EXPECT_TRUE(ignored >> (signal - 1) & 1);
    if (killed) {
      job.kill(SIGKILL);
    } else {
      write_file(dir.path() + "/go", "");
    }
    EXPECT_EQ(job.wait().code, killed ? 137 : 0);
    EXPECT_TRUE(eventually([&] { return !is_guard(guard); }));
    EXPECT_TRUE(nobody_left(job));
    unlink((dir.path() + "/go").c_str());
  }
}

TEST(LauncherEnd, StopSignalsReachEveryRank) {
  for (const auto& [signal, name] :
       {std::pair(SIGTERM, "TERM"), std::pair(SIGINT, "INT"), std::pair(SIGHUP, "HUP")}) {
    Subprocess job(run_script(3, std::string("trap 'echo got ") + name + "; exit 1' " + name +
                                     "; echo ready; while :; do sleep 0.01; done"));
    ASSERT_TRUE(all_printed(job, "ready", 3));
    job.kill(signal);
    const Result result = job.wait();
    EXPECT_EQ(count(result.out, std::string("got ") + name), 3u) << result.out;
    EXPECT_THAT(result.last_line(), HasSubstr(std::string("stopped by SIG") + name));
    EXPECT_EQ(result.code, 1);  // what all ranks chose
    EXPECT_TRUE(nobody_left(job));
  }
}

TEST(LauncherEnd, RanksThatDieOfTheSignalMakeItTheStatus) {
  Subprocess job(run_script(2, "echo ready; sleep 1000"));
  ASSERT_TRUE(all_printed(job, "ready", 2));
  job.kill(SIGTERM);
  const Result result = job.wait();
  EXPECT_EQ(result.code, 128 + SIGTERM);
  EXPECT_THAT(result.last_line(), HasSubstr("stopped by SIGTERM"));
}

TEST(LauncherEnd, RanksMaySaveAndSayThatTheyWerePreempted) {
  // Rank 1 needs longer than the grace for deaths: it is not hurried.
  Subprocess job(run_script(2,
                            "trap 'test $RANK = 0 || sleep 1; echo saved; exit 75' TERM; "
                            "echo ready; while :; do sleep 0.01; done",
                            {"--max-restarts", "3"}));
  ASSERT_TRUE(all_printed(job, "ready", 2));
  job.kill(SIGTERM);
  const Result result = job.wait();
  EXPECT_EQ(result.code, 75) << result.err;
  EXPECT_EQ(count(result.out, "saved"), 2u);
  EXPECT_THAT(result.last_line(), AllOf(HasSubstr("SIGTERM"), HasSubstr("code 75")));
}

TEST(LauncherEnd, OtherSignalsArePassedOn) {
  Subprocess job(
      run_script(2, "trap 'echo got it; exit 0' USR1; echo ready; while :; do sleep 0.01; done"));
  ASSERT_TRUE(all_printed(job, "ready", 2));
  job.kill(SIGUSR1);
  const Result result = job.wait();
  EXPECT_EQ(result.code, 0);
  EXPECT_EQ(count(result.out, "got it"), 2u);
}

TEST(LauncherEnd, ASecondSignalUrgesAndAThirdKills) {
  const std::string deaf = "trap '' TERM INT; echo ready; sleep 1000; sleep 1000";
  for (const int signals : {2, 3}) {
    // With a grace this long only the third signal ends the job in time.
    Subprocess job(run_script(2, deaf, {"--grace", signals == 2 ? "100" : "20000"}));
    ASSERT_TRUE(all_printed(job, "ready", 2));
    for (int i = 0; i < signals; ++i) {
      job.kill(SIGINT);
      // Signals of one kind merge while they wait: let each be taken.
      const std::string status = "/proc/" + std::to_string(job.pid()) + "/status";
      eventually(
          [&] { return read_file(status).find("ShdPnd:\t0000000000000000") != std::string::npos; });
    }
    const Result result = job.wait(milliseconds{15'000});
    EXPECT_EQ(result.code, 128 + SIGINT);
    EXPECT_TRUE(nobody_left(job));
  }
}

TEST(LauncherEnd, ThePatienceAfterAStopSignalIsAnOption) {
  Subprocess job(
      run_script(1, "trap '' TERM; echo ready; sleep 1000; sleep 1000", {"--stop-grace", "200"}));
  ASSERT_TRUE(all_printed(job, "ready", 1));
  job.kill(SIGTERM);
  EXPECT_EQ(job.wait().code, 128 + SIGTERM);
  EXPECT_TRUE(nobody_left(job));
}

TEST(LauncherEnd, AStoppedRankCanBeEnded) {
  Subprocess job(run_script(2, "echo ready; test $RANK = 0 && kill -STOP $$; sleep 1000"));
  ASSERT_TRUE(all_printed(job, "ready", 2));
  job.kill(SIGTERM);
  EXPECT_EQ(job.wait().code, 128 + SIGTERM);
  EXPECT_TRUE(nobody_left(job));
}

TEST(LauncherEnd, ARankCanWaitForADebugger) {
  Subprocess job(run_script(2, "echo timeout $LOCKSTEP_TIMEOUT", {"--hang-rank", "1"}));
  ASSERT_TRUE(eventually([&] { return job.err().find("gdb -p ") != std::string::npos; }));
  ASSERT_TRUE(all_printed(job, "[rank0]: timeout 86400", 1));
  const std::string err = job.err();
  EXPECT_THAT(err, says("[rank1]: rank 1 ... debugger ... gdb -p"));
  const pid_t pid = std::stoi(err.substr(err.find("gdb -p ") + 7));
  EXPECT_EQ(job.out().find("[rank1]"), std::string::npos);
  ASSERT_EQ(ptrace(PTRACE_SEIZE, pid, nullptr, nullptr), 0);
  int status = 0;
  ASSERT_EQ(waitpid(pid, &status, __WALL), pid);  // a traced process ends for its tracer first
  EXPECT_TRUE(WIFEXITED(status));
  const Result result = job.wait();
  EXPECT_EQ(result.code, 0);
  EXPECT_THAT(result.out, HasSubstr("[rank1]: timeout 86400"));
}

}  // namespace
}  // namespace lockstep::test
