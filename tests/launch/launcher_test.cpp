// SPDX-License-Identifier: Apache-2.0
// What a job is given and what it gives back: environment, exit codes, last line, restarts,
// options.
#include "lockstep/launch/launcher.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <set>

#include "lockstep/core/rank_env.h"
#include "lockstep/launch/processes/affinity.h"
#include "lockstep/launch/rendezvous/rendezvous.h"
#include "lockstep/launch/rendezvous/socket.h"
#include "tests/support/says.h"
#include "tests/support/subprocess.h"

namespace lockstep::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;
using ::testing::StartsWith;

Result run(int ranks, const std::string& script, const std::vector<std::string>& options = {},
           const std::vector<std::string>& variables = {}) {
  return Subprocess(run_script(ranks, script, options), variables).wait();
}

// This test program itself as a rank: `name` is a disabled test below.
std::vector<std::string> run_self(int ranks, const std::string& name) {
  return {LOCKSTEP_COMMAND,
          "run",
          "-n",
          std::to_string(ranks),
          this_program(),
          "--gtest_also_run_disabled_tests",
          "--gtest_filter=RankProgram.DISABLED_" + name};
}

TEST(Launcher, SetsTheVariablesOfTorchrun) {
  const std::string script =
      "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK $GROUP_WORLD_SIZE "
      "$ROLE_RANK $ROLE_WORLD_SIZE $ROLE_NAME $MASTER_ADDR $TORCHELASTIC_RESTART_COUNT "
      "$TORCHELASTIC_MAX_RESTARTS $TORCHELASTIC_USE_AGENT_STORE $LOCKSTEP_GENERATION; "
      "echo port=$MASTER_PORT id=$TORCHELASTIC_RUN_ID at=$LOCKSTEP_RENDEZVOUS "
      "fd=$LOCKSTEP_TOKEN_FD";
  const Result result = run(3, script, {"--max-restarts", "4"});
  EXPECT_EQ(result.code, 0);
  EXPECT_EQ(result.err, "");
  for (const std::string rank : {"0", "1", "2"}) {
    EXPECT_THAT(result.out, HasSubstr("[rank" + rank + "]: " + rank + " 3 " + rank + " 3 0 1 " +
                                      rank + " 3 default 127.0.0.1 0 4 False 0\n"));
  }
  EXPECT_THAT(result.out, MatchesRegex("(.|\n)*port=[1-9][0-9]+ id=lockstep-[0-9a-f]+ "
                                       "at=127.0.0.1:[1-9][0-9]+ fd=[0-9]+\n(.|\n)*"));
}

TEST(Launcher, RaisesTheNumberOfOpenFiles) {
  const std::string command = LOCKSTEP_COMMAND " run -n 2 -- sh -c 'ulimit -Sn'";
  const Result result =
      Subprocess({"sh", "-c", "ulimit -Sn 200 && ulimit -Hn 3000 && exec " + command}).wait();
  EXPECT_EQ(result.code, 0) << result.err;
  for (const char* rank : {"0", "1"})
    EXPECT_THAT(result.out, HasSubstr(std::string("[rank") + rank + "]: 3000\n"));
}

TEST(Launcher, DividesTheCoresAndLeavesWhatTheUserSet) {
  const auto cores = static_cast<int>(launch::allowed_cores().size());
  const std::string script =
      "echo $OMP_NUM_THREADS $OPENBLAS_NUM_THREADS $(nproc) $(grep Cpus_allowed_list "
      "/proc/self/status)";
  const Result one = run(1, script);
  EXPECT_THAT(one.out,
              StartsWith("[rank0]: " + std::to_string(cores) + " " + std::to_string(cores)));
  if (cores >= 2) {
    const Result two = run(2, script);
    const std::string half = std::to_string(cores / 2);
    EXPECT_THAT(two.out, HasSubstr("[rank0]: " + half + " " + half + " "));
    EXPECT_THAT(two.out, HasSubstr("[rank1]: " + half + " " + half + " "));
  }
  const Result many = run(cores + 1, script);  // shared, not pinned
  const std::string all = std::to_string(cores);
  EXPECT_THAT(many.out, HasSubstr("[rank" + all + "]: 1 1 1 "));
  EXPECT_THAT(run(1, script, {}, {"OMP_NUM_THREADS=7"}).out, StartsWith("[rank0]: 7 " + all + " "));
  EXPECT_THAT(run(1, script, {}, {"OPENBLAS_NUM_THREADS=7"}).out,
              StartsWith("[rank0]: " + all + " 7 "));
}

TEST(Launcher, SharesOfCoresAreContiguousAndComplete) {
  const std::vector<int> cores = {0, 1, 2, 5, 6, 7, 9};
  for (int ranks = 1; ranks <= 7; ++ranks) {
    std::vector<int> all;
    for (int rank = 0; rank < ranks; ++rank) {
      const auto share = launch::core_share(cores, rank, ranks);
      EXPECT_GE(static_cast<int>(share.size()), launch::threads_per_rank(7, ranks));
      all.insert(all.end(), share.begin(), share.end());
    }
    EXPECT_EQ(all, cores);
  }
  EXPECT_TRUE(launch::core_share(cores, 0, 8).empty());
  EXPECT_EQ(launch::threads_per_rank(2, 4), 1);
  EXPECT_EQ(launch::threads_per_rank(16, 3), 5);
}

TEST(Launcher, ReturnsTheCodeOfTheRankThatFailedFirstAndNamesIt) {
  const Result code = run(3, "test $RANK != 1 || exit 3; sleep 1000");
  EXPECT_EQ(code.code, 3);
  EXPECT_THAT(code.last_line(), AllOf(HasSubstr("rank 1 "), HasSubstr("code 3"),
                                      HasSubstr("output is above"), HasSubstr("--log-dir")));
  const Result killed = run(2, "test $RANK != 0 || kill -SEGV $$; sleep 1000");
  EXPECT_EQ(killed.code, 128 + SIGSEGV);
  EXPECT_THAT(killed.last_line(), AllOf(HasSubstr("rank 0 "), HasSubstr("SIGSEGV (signal 11)")));
  const Result good = run(2, "exit 0");
  EXPECT_EQ(good.code, 0);
  EXPECT_EQ(good.err, "");
}

TEST(Launcher, AProgramThatCannotStartIsOneLine) {
  const Result missing =
      lockstep_command({"run", "-n", "3", "no-such-program"}, {"PATH=/usr/bin:/bin"});
  EXPECT_EQ(missing.code, 127);
  EXPECT_THAT(missing.err, AllOf(HasSubstr("'no-such-program'"), HasSubstr("No such file")));
  EXPECT_EQ(std::count(missing.err.begin(), missing.err.end(), '\n'), 1);
  const TempDir dir;
  write_file(dir.path() + "/plain", "text");
  const Result plain = lockstep_command({"run", "-n", "1", dir.path() + "/plain"});
  EXPECT_EQ(plain.code, 127);
  EXPECT_THAT(plain.err, HasSubstr("Permission denied"));
  // Not even a restart helps.
  const Result again = lockstep_command(
      {"run", "-n", "1", "--max-restarts", "3", "no-such-program"}, {"PATH=/usr/bin:/bin"});
  EXPECT_EQ(std::count(again.err.begin(), again.err.end(), '\n'), 1);
}

// A rank that knows why it cannot go on may be seen to end after those that miss it.
TEST(Launcher, ACodeThatForbidsARestartCountsWheneverItComes) {
  const TempDir dir;
  const std::string left = dir.path() + "/left";
  const std::string script = "if [ $RANK = 1 ]; then touch " + left + "; exit 1; fi; until [ -e " +
                             left + " ]; do sleep 0.01; done; sleep 0.2; exit 74";
  const Result result = run(2, script, {"--max-restarts", "2", "--grace", "5000"});
  EXPECT_EQ(result.code, 74);
  EXPECT_THAT(result.err, Not(HasSubstr("starting all 2 ranks again")));
  EXPECT_THAT(result.err, HasSubstr("rank 0"));
}

TEST(Launcher, StartsAgainWithANewGeneration) {
  const TempDir dir;
  const std::string script =
      "echo run $TORCHELASTIC_RESTART_COUNT generation $LOCKSTEP_GENERATION; "
      "test $RANK = 1 -a $TORCHELASTIC_RESTART_COUNT -lt 2 && exit 9; "
      "test $TORCHELASTIC_RESTART_COUNT -ge 2 || sleep 1000";
  const Result result =
      run(2, script, {"--max-restarts", "3", "--grace", "50", "--log-dir", dir.path()});
  EXPECT_EQ(result.code, 0) << result.err;
  for (const std::string count : {"0", "1", "2"}) {
    EXPECT_THAT(result.out, HasSubstr("[rank0]: run " + count + " generation " + count));
    EXPECT_THAT(read_file(dir.path() + "/attempt_" + count + "/rank1/stdout.log"),
                HasSubstr("run " + count));
  }
  EXPECT_THAT(result.err, AllOf(HasSubstr("restart 1 of 3"), HasSubstr("restart 2 of 3"),
                                HasSubstr("rank 1 "), Not(HasSubstr("restart 3 of"))));
  const Result all_fail = run(2, "exit 9", {"--max-restarts", "2"});
  EXPECT_EQ(all_fail.code, 9);
  EXPECT_THAT(all_fail.last_line(), HasSubstr("code 9"));
}

TEST(Launcher, SomeCodesAreNotWorthARestart) {
  for (const int code : {2, 75, 78, 93}) {
    const Result result = run(1, "exit " + std::to_string(code), {"--max-restarts", "3"});
    EXPECT_EQ(result.code, code);
    EXPECT_THAT(result.err, Not(HasSubstr("restart 1")));
  }
}

TEST(Launcher, BadOptionsAreOneLineAndNothingRuns) {
  const TempDir dir;
  write_file(dir.path() + "/open", "secret", 0644);
  const std::string touch = dir.path() + "/touched";
  struct Case {
    std::vector<std::string> options;
    std::vector<std::string> words;
  };
  const std::vector<Case> cases = {
      {{"-n", "0"}, {"-n 0", "1 to"}},
      {{"-n", "-2"}, {"-2"}},
      {{"-n", "many"}, {"many", "whole number"}},
      {{"-n", "99999"}, {"99999"}},
      {{}, {"-n N", "required"}},
      {{"-n", "2", "--frob"}, {"--frob", "--help"}},
      {{"-n", "2", "--nnodes", "2", "--node-rank", "2"}, {"--node-rank 2", "--nnodes 2"}},
      {{"-n", "2", "--node-rank", "-1"}, {"--node-rank -1"}},
      {{"-n", "2", "--hang-rank", "2"}, {"--hang-rank 2", "world size 2"}},
      {{"-n", "2", "--max-restarts", "-1"}, {"--max-restarts -1"}},
      {{"-n", "2", "--grace", "-5"}, {"--grace"}},
      {{"-n", "2", "--nnodes", "2"}, {"--rendezvous"}},
      {{"-n", "2", "--nnodes", "2", "--rendezvous", "localhost"}, {"'localhost'", "HOST:PORT"}},
      {{"-n", "2", "--nnodes", "2", "--rendezvous", "127.0.0.1:0"}, {"127.0.0.1:0"}},
      {{"-n", "2", "--nnodes", "2", "--rendezvous", "127.0.0.1:9"}, {"--token-file", "secret"}},
      {{"-n", "2", "--rendezvous", "127.0.0.1:99999"}, {"99999"}},
      {{"-n", "2", "--token-file", dir.path() + "/none"}, {"/none"}},
      {{"-n", "2", "--token-file", dir.path() + "/open"}, {"chmod 600"}},
      {{"-n", "2", "--log-dir", "/proc/nowhere"}, {"--log-dir", "/proc/nowhere"}},
      {{"-n", "2", "--log-dir", dir.path() + "/open"}, {"--log-dir"}},
  };
  for (const Case& each : cases) {
    std::vector<std::string> arguments = {"run"};
    arguments.insert(arguments.end(), each.options.begin(), each.options.end());
    arguments.insert(arguments.end(), {"touch", touch});
    const Result result = lockstep_command(arguments);
    EXPECT_EQ(result.code, 2) << result.err;
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
    for (const std::string& word : each.words) EXPECT_THAT(result.err, HasSubstr(word));
    EXPECT_NE(access(touch.c_str(), F_OK), 0);
  }
  const Result no_program = lockstep_command({"run", "-n", "2"});
  EXPECT_EQ(no_program.code, 2);
  EXPECT_THAT(no_program.err, HasSubstr("PROGRAM"));
}

// As mpirun calls it; what the program calls so is the program's.
TEST(Launcher, TheNumberOfRanksHasTheNameOfMpirunToo) {
  const Result result = lockstep_command({"run", "--max-restarts", "0", "-np", "2", "sh", "-c",
                                          "echo $RANK of $WORLD_SIZE $1", "sh", "-np"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("[rank1]: 1 of 2 -np\n"));
}

// Each would be a job of its own.
TEST(Launcher, CopiesOfItselfAreRefused) {
  const struct {
    std::vector<std::string> variables;
    std::string launcher;
  } cases[] = {
      {{"OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE=2"}, "Open MPI"},
      {{"SLURM_STEP_ID=0", "SLURM_PROCID=1", "SLURM_STEP_NUM_TASKS=2"}, "Slurm"},
      {{"RANK=1", "WORLD_SIZE=2"}, "torchrun"},
      {{"RANK=1", "WORLD_SIZE=2", "LOCKSTEP_RENDEZVOUS=127.0.0.1:9"}, "lockstep run"},
  };
  for (const auto& [variables, launcher] : cases) {
    const Result result = lockstep_command({"run", "-n", "1", "echo", "ran"}, variables);
    EXPECT_EQ(result.code, 2);
    EXPECT_EQ(result.out, "");
    EXPECT_THAT(result.err, says(launcher + " ... 2 copies ... --nnodes"));
  }
  // One copy is what a step of one task, and a node's launcher, is.
  const Result one =
      lockstep_command({"run", "-n", "1", "echo", "ran"},
                       {"SLURM_STEP_ID=0", "SLURM_PROCID=0", "SLURM_STEP_NUM_TASKS=1"});
  EXPECT_EQ(one.code, 0) << one.err;
  const Result node = lockstep_command({"run", "-n", "1", "--nnodes", "2", "echo", "ran"},
                                       {"SLURM_STEP_ID=0", "SLURM_STEP_NUM_TASKS=2"});
  EXPECT_THAT(node.err, AllOf(HasSubstr("--rendezvous"), Not(HasSubstr("copies"))));
}

TEST(Launcher, APortThatIsTakenIsNamed) {
  const launch::HostPort any{"127.0.0.1", 0};
  const Fd taken = launch::bind_socket(any);
  launch::start_listening(taken, any);
  const std::string address = "127.0.0.1:" + std::to_string(launch::port_of(taken));
  const Result result =
      lockstep_command({"run", "-n", "1", "--rendezvous", address, "echo", "ran"});
  EXPECT_EQ(result.code, 1);
  EXPECT_EQ(result.out, "");
  EXPECT_THAT(result.err, says(address + " ... another port"));
}

TEST(Launcher, WhatFollowsTheProgramIsTheProgramsOwn) {
  const std::string script = "for word in \"$@\"; do echo \"<$word>\"; done";
  const auto words = [&](const std::vector<std::string>& before) {
    std::vector<std::string> arguments = {"run", "-n", "1"};
    arguments.insert(arguments.end(), before.begin(), before.end());
    arguments.insert(arguments.end(), {"sh", "-c", script, "sh", "-n", "--help", "--", "a b", "",
                                       "$HOME", "--nnodes=3"});
    return lockstep_command(arguments).out;
  };
  const std::string expected =
      "[rank0]: <-n>\n[rank0]: <--help>\n[rank0]: <-->\n[rank0]: <a b>\n[rank0]: <>\n"
      "[rank0]: <$HOME>\n[rank0]: <--nnodes=3>\n";
  EXPECT_EQ(words({}), expected);
  EXPECT_EQ(words({"--"}), expected);
}

TEST(Launcher, TheCommandExplainsItself) {
  const Result version = lockstep_command({"--version"});
  EXPECT_EQ(version.code, 0);
  EXPECT_THAT(version.out, MatchesRegex("lockstep [0-9]+\\.[0-9]+\\.[0-9]+\n"));
  EXPECT_THAT(lockstep_command({"--help"}).out, AllOf(HasSubstr("run "), Not(HasSubstr("__"))));
  EXPECT_THAT(lockstep_command({"run", "--help"}).out,
              AllOf(HasSubstr("--hang-rank"), HasSubstr("PROGRAM [ARGS...]")));
  const Result unknown = lockstep_command({"frobnicate"});
  EXPECT_EQ(unknown.code, 2);
  EXPECT_THAT(unknown.err, AllOf(HasSubstr("'frobnicate'"), HasSubstr("run")));
  EXPECT_EQ(lockstep_command({}).code, 2);
}

TEST(Launcher, AHundredStartsFindTheirPorts) {
  for (int i = 0; i < 100; ++i) {
    const Result result = lockstep_command({"run", "-n", "2", "/bin/true"});
    ASSERT_EQ(result.code, 0) << result.err;
    ASSERT_EQ(result.err, "");
  }
}

TEST(Launcher, TheSamePortAgainAndAgain) {
  const Fd holder = launch::bind_socket({"127.0.0.1", 0});
  const std::string address = "127.0.0.1:" + std::to_string(launch::port_of(holder));
  for (int i = 0; i < 10; ++i) {
    auto argv = run_self(2, "MeetsItsPeers");
    argv.insert(argv.begin() + 4, {"--rendezvous", address});
    const Result result = Subprocess(argv).wait();
    ASSERT_EQ(result.code, 0) << result.out << result.err;
  }
}

TEST(Launcher, RanksMeetAtTheRendezvous) {
  const Result result = Subprocess(run_self(4, "MeetsItsPeers")).wait();
  EXPECT_EQ(result.code, 0) << result.out << result.err;
}

TEST(Launcher, AProgramMayListenOnTheMasterPort) {
  const Result result = Subprocess(run_self(2, "ListensOnTheMasterPort")).wait();
  EXPECT_EQ(result.code, 0) << result.out << result.err;
}

TEST(Launcher, TheTokenIsNotToBeSeen) {
  const TempDir dir;
  write_file(dir.path() + "/token", "very-secret-words\n");
  Subprocess job(
      run_script(2, "echo started; cat; sleep 1000", {"--token-file", dir.path() + "/token"}));
  ASSERT_TRUE(eventually([&] { return job.others().size() >= 2 && job.out().size() > 30; }));
  std::vector<pid_t> all = job.others();
  all.push_back(job.pid());
  for (const pid_t pid : all) {
    const std::string folder = "/proc/" + std::to_string(pid);
    EXPECT_THAT(read_file(folder + "/environ"), Not(HasSubstr("very-secret-words")));
    EXPECT_THAT(read_file(folder + "/cmdline"), Not(HasSubstr("very-secret-words")));
  }
  // From the variable, too, it does not reach the ranks' environment.
  const Result given =
      run(1, "env; cat /proc/self/environ", {}, {"LOCKSTEP_TOKEN=very-secret-words"});
  EXPECT_EQ(given.code, 0);
  EXPECT_THAT(given.out, Not(HasSubstr("very-secret-words")));
}

// ---- programs that the tests above start as ranks ----

TEST(RankProgram, DISABLED_MeetsItsPeers) {
  const RankEnv env = RankEnv::detect();
  EXPECT_EQ(env.launcher, Launcher::lockstep);
  const auto store =
      launch::connect_from_environment(env.rank, env.world_size, Deadline(kDefaultTimeout));
  store->set("rank/" + std::to_string(env.rank), "here");
  for (int peer = 0; peer < env.world_size; ++peer) {
    EXPECT_EQ(store->get("rank/" + std::to_string(peer), Deadline(kDefaultTimeout)), "here");
  }
  if (store->add("left", 1) == env.world_size) store->set("all left", "yes");
  store->get("all left", Deadline(kDefaultTimeout));
}

TEST(RankProgram, DISABLED_ListensOnTheMasterPort) {
  const RankEnv env = RankEnv::detect();
  const launch::HostPort where{env.master_addr, static_cast<uint16_t>(env.master_port)};
  const auto store =
      launch::connect_from_environment(env.rank, env.world_size, Deadline(kDefaultTimeout));
  if (env.rank == 0) {
    const Fd socket = launch::bind_socket({"0.0.0.0", where.port});
    launch::start_listening(socket, where);
    store->get("connected", Deadline(kDefaultTimeout));
  } else {
    EXPECT_NO_THROW(launch::connect_socket({where}, Deadline(kDefaultTimeout)));
    store->set("connected", "yes");
  }
}

}  // namespace
}  // namespace lockstep::test
