// SPDX-License-Identifier: Apache-2.0
// Programs started by our launcher, by Slurm, with variables set by hand, or alone, all come
// together; init_again_test.cpp has mpirun and torchrun.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "lockstep/launch/rendezvous/rendezvous.h"
#include "tests/support/says.h"
#include "tests/support/subprocess.h"

namespace lockstep::test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

const std::string kInitRank = std::string(LOCKSTEP_TEST_BIN) + "/init_rank";

Result run(const std::vector<std::string>& argv, const std::vector<std::string>& variables = {}) {
  Subprocess process(argv, variables);
  return process.wait(milliseconds{60'000});
}

TEST(Init, WithoutALauncherTheGroupHasOneRank) {
  const Result result = run({kInitRank});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("rank 0 of 1, local 0 of 1, backend none, sum 1"));
}

TEST(Init, AutoOverTwoHostsIsGlooAndLocalRanksAreReal) {
  // Ranks 0 and 2 say that they are on one host, 1 and 3 on another.
  const Result result =
      run({LOCKSTEP_COMMAND, "run", "-n", "4", "sh", "-c",
           "LOCKSTEP_HOST=host$((RANK % 2)) GLOO_SOCKET_IFNAME=lo exec " + kInitRank});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("rank 2 of 4, local 1 of 2, backend gloo, sum 10"));
  EXPECT_THAT(result.out, HasSubstr("rank 3 of 4, local 1 of 2, backend gloo, sum 10"));
  EXPECT_THAT(result.out, HasSubstr("rank 1 of 4, local 0 of 2, backend gloo, sum 10"));
}

TEST(Init, ShmOverTwoHostsIsRefused) {
  const Result result = run({LOCKSTEP_COMMAND, "run", "-n", "2", "sh", "-c",
                             "LOCKSTEP_HOST=host$RANK exec " + kInitRank + " shm"});
  EXPECT_EQ(result.code, 2);
  EXPECT_THAT(result.err, says("backend shm ... 2 ranks ... group 'world' ... 2 hosts"));
}

#ifdef LOCKSTEP_MPIRUN
TEST(Init, MpiWithoutAnMpiLauncherSaysSo) {
  const Result result = run({LOCKSTEP_COMMAND, "run", "-n", "2", kInitRank, "mpi"});
  EXPECT_EQ(result.code, 2);
  EXPECT_THAT(result.err, says("mpirun or srun"));
}
#endif

#ifdef LOCKSTEP_TORCHRUN_PYTHON
TEST(Init, PythonProgramsUnderOurLauncher) {
  const std::string program =
      "import torch, torch.distributed as d; d.init_process_group('gloo'); t = torch.full((3,), "
      "d.get_rank() + 1.0); d.all_reduce(t); "
      "print('python rank', d.get_rank(), 'sum', t[0].item()); d.destroy_process_group()";
  const Result result =
      run({LOCKSTEP_COMMAND, "run", "-n", "2", LOCKSTEP_TORCHRUN_PYTHON, "-c", program});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("python rank 1 sum 3.0"));
}
#endif

// Two processes with the given variables each.
std::pair<Result, Result> run_pair(const std::vector<std::string>& first,
                                   const std::vector<std::string>& second) {
  Subprocess a({kInitRank}, first), b({kInitRank}, second);
  Result result_b = b.wait(milliseconds{60'000});
  return {a.wait(milliseconds{60'000}), result_b};
}

// A port that was free a moment ago; these two tests imitate users who choose one by hand.
std::string some_port() {
  const launch::RendezvousServer server("probe");
  return server.address().substr(server.address().rfind(':') + 1);
}

TEST(Init, VariablesSetByHand) {
  const std::string port = "MASTER_PORT=" + some_port();
  const auto [a, b] = run_pair({"RANK=0", "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", port},
                               {"RANK=1", "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", port});
  EXPECT_EQ(a.code, 0) << a.err;
  EXPECT_THAT(b.out, HasSubstr("rank 1 of 2, local 1 of 2, backend shm, sum 3")) << b.err;
}

TEST(Init, SlurmStep) {
  const std::string port = "MASTER_PORT=" + some_port();
  const std::vector<std::string> step{"SLURM_JOB_ID=77", "SLURM_STEP_ID=0",
                                      "SLURM_STEP_NUM_TASKS=2", "SLURM_STEP_NODELIST=localhost",
                                      port};
  auto first = step, second = step;
  first.insert(first.end(), {"SLURM_PROCID=0", "SLURM_LOCALID=0"});
  second.insert(second.end(), {"SLURM_PROCID=1", "SLURM_LOCALID=1"});
  const auto [a, b] = run_pair(first, second);
  EXPECT_EQ(a.code, 0) << a.err;
  EXPECT_THAT(b.out, HasSubstr("rank 1 of 2, local 1 of 2, backend shm, sum 3")) << b.err;
}

TEST(Init, StepsOfOneSlurmJobDoNotMeet) {
  const std::string port = "MASTER_PORT=" + some_port();
  const auto variables = [&](const std::string& step, const std::string& rank) {
    return std::vector<std::string>{"SLURM_JOB_ID=77",
                                    "SLURM_STEP_ID=" + step,
                                    "SLURM_STEP_NUM_TASKS=2",
                                    "SLURM_STEP_NODELIST=localhost",
                                    "SLURM_PROCID=" + rank,
                                    "SLURM_LOCALID=" + rank,
                                    port};
  };
  Subprocess first({kInitRank}, variables("0", "0"));
  const Result other = run({kInitRank}, variables("1", "1"));
  EXPECT_EQ(other.code, 2);
  EXPECT_THAT(other.err, says("another job"));
  EXPECT_EQ(run({kInitRank}, variables("0", "1")).code, 0);
  const Result result = first.wait(milliseconds{60'000});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.err, says("no secret"));
  EXPECT_THAT(result.err, HasSubstr("LOCKSTEP_TOKEN_FILE"));
}

TEST(Init, ASecretInAFileClosesTheJob) {
  const TempDir dir;
  const std::string path = dir.path() + "/secret";
  write_file(path, "of this job");
  const std::string port = "MASTER_PORT=" + some_port(), file = "LOCKSTEP_TOKEN_FILE=" + path;
  Subprocess first({kInitRank}, {"RANK=0", "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", port, file});
  const Result without =
      run({kInitRank}, {"RANK=1", "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", port});
  EXPECT_THAT(without.err, HasSubstr("wrong token"));
  EXPECT_EQ(run({kInitRank}, {"RANK=1", "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", port, file}).code,
            0);
  const Result result = first.wait(milliseconds{60'000});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.err, Not(HasSubstr("no secret")));
}

TEST(Init, RanksThatWantDifferentThingsSaySo) {
  const auto run_two = [](const std::string& command) {
    return run({LOCKSTEP_COMMAND, "run", "-n", "2", "sh", "-c", command});
  };
  Result result = run_two("LOCKSTEP_CHECK=$RANK exec " + kInitRank);
  EXPECT_EQ(result.code, 2);
  EXPECT_THAT(result.err, says("[init] ... compared on rank 1"));
  EXPECT_THAT(result.err, says("not compared ... rank 0"));
  result =
      run_two("[ $RANK = 0 ] && strategy=ring; exec " + kInitRank + " shm 3 ${strategy:-tree}");
  EXPECT_EQ(result.code, 2);
  EXPECT_THAT(result.err, HasSubstr("[init] the ranks differ: strategy ring on rank 0"));
  EXPECT_THAT(result.err, HasSubstr("strategy tree on rank 1"));
}

TEST(Init, LinesOfARankThatDiesAreKept) {
  const Result result = run({LOCKSTEP_COMMAND, "run", "-n", "2", kInitRank, "--vanish"});
  EXPECT_EQ(result.code, 3) << result.err;
  EXPECT_THAT(result.out, HasSubstr("the last words of rank 1"));
}

TEST(Init, AMissingRankIsNamedAtTheDeadline) {
  const Result result = run({kInitRank}, {"RANK=0", "WORLD_SIZE=3", "MASTER_ADDR=127.0.0.1",
                                          "MASTER_PORT=" + some_port(), "LOCKSTEP_TIMEOUT=0.5"});
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.err, HasSubstr("[init] 1 of 3 ranks joined; missing: 1, 2"));
}

TEST(Init, BadInput) {
  EXPECT_THAT(
      run({kInitRank, "carrier-pigeon"}).err,
      HasSubstr("unknown backend 'carrier-pigeon'; available are auto, thread, shm, mpi, gloo"));
  EXPECT_THAT(run({kInitRank}, {"RANK=3", "WORLD_SIZE=2"}).err,
              HasSubstr("RANK=3 and WORLD_SIZE=2"));
  EXPECT_THAT(run({kInitRank}, {"RANK=0", "WORLD_SIZE=2"}).err,
              HasSubstr("set MASTER_ADDR and MASTER_PORT"));
  EXPECT_THAT(run({kInitRank, "thread"}).err, HasSubstr("use run_threads"));
  EXPECT_THAT(run({kInitRank}, {"RANK=0", "WORLD_SIZE=2", "LOCKSTEP_TIMEOUT=soon"}).err,
              says("LOCKSTEP_TIMEOUT=soon ... number"));
}

}  // namespace
}  // namespace lockstep::test
