// SPDX-License-Identifier: Apache-2.0
// Ranks that are processes, one of which dies, stops, or does not come: what the others get, and
// that the job ends.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <regex>
#include <sstream>

#include "tests/support/sampling.h"
#include "tests/support/says.h"
#include "tests/support/subprocess.h"

namespace lockstep::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::vector<std::string> lines_with(const std::string& text, const std::string& word) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    if (line.find(word) != std::string::npos) lines.push_back(line);
  }
  return lines;
}

double after_ms(const std::string& line) {
  std::smatch match;
  return std::regex_search(line, match, std::regex("after_ms=([0-9]+)")) ? std::stod(match[1]) : -1;
}

const std::string kProgram = std::string(LOCKSTEP_TEST_BIN) + "/fault_rank";

void expect_everybody_lost(const Result& result, int survivors, int victim) {
  const auto caught = lines_with(result.out, "caught");
  ASSERT_EQ(caught.size(), survivors) << result.out << result.err;
  for (const std::string& line : caught) {
    EXPECT_THAT(line, HasSubstr("caught PeerLost lost=" + std::to_string(victim)));
    EXPECT_THAT(line, HasSubstr("all_reduce(float32[100000], sum)"));
    // The deadline of the operation is 60 s; that it was not needed shows that the death was
    // seen.
    EXPECT_LT(after_ms(line), 20'000) << line;
    std::cout << line << "\n";
  }
  EXPECT_NE(result.code, 0);
}

class Faults : public ::testing::TestWithParam<std::string> {
 protected:
  // Grace: the launcher leaves the survivors time to say what they caught.
  Result run(int ranks, const std::string& mode, int victim, int timeout_ms,
             const std::string& grace = "20000") {
    return lockstep_command({"run", "-n", std::to_string(ranks), "--grace", grace, kProgram,
                             GetParam(), mode, std::to_string(victim), std::to_string(timeout_ms)});
  }
};

TEST_P(Faults, AKilledRankIsNamedByEverySurvivor) {
  expect_everybody_lost(run(4, "die", 2, 60'000), 3, 2);
}

TEST_P(Faults, AKilledFirstRankIsNamedByEverySurvivor) {
  expect_everybody_lost(run(3, "die", 0, 60'000), 2, 0);
}

TEST_P(Faults, ASenderThatDiesEndsTheReceive) {
  const Result result = run(2, "die_in_message", 0, 60'000);
  const auto caught = lines_with(result.out, "caught");
  ASSERT_EQ(caught.size(), 1) << result.out << result.err;
  EXPECT_THAT(caught[0], HasSubstr("caught PeerLost lost=0"));
  EXPECT_THAT(caught[0], HasSubstr("recv(float32[100000], from 0)"));
  EXPECT_LT(after_ms(caught[0]), 20'000);
}

TEST_P(Faults, ALateRankIsReportedThenATimeout) {
  const Result result = run(3, "late", 1, 5'000, "2000");
  const auto caught = lines_with(result.out, "caught"),
             warned = lines_with(result.err, "rank 1 is late");
  ASSERT_EQ(caught.size(), 2) << result.out << result.err;
  for (const std::string& line : caught) {
    EXPECT_THAT(line, HasSubstr("caught TimeoutError"));
    EXPECT_THAT(line, HasSubstr("has finished broadcast #3"));
    EXPECT_THAT(line, says("deadline"));
  }
  ASSERT_EQ(warned.size(), 1) << result.err;
  EXPECT_THAT(warned[0], AllOf(HasSubstr("ranks 0, 2 "), HasSubstr("all_reduce #4 "),
                               HasSubstr("float32[100000]"), HasSubstr("broadcast #3 ")));
  EXPECT_THAT(result.err, HasSubstr("    pause\n")) << "the stack of its thread";
}

TEST_P(Faults, AStoppedRankIsATimeout) {
  const Result result = run(2, "stop", 1, 3'000, "1000");
  const auto caught = lines_with(result.out, "caught");
  ASSERT_EQ(caught.size(), 1) << result.out << result.err;
  EXPECT_THAT(caught[0], HasSubstr("caught TimeoutError"));
  EXPECT_THAT(caught[0], HasSubstr("rank 1"));
  // Who gave up first is not who is to blame.
  EXPECT_THAT(result.last_line(), AllOf(HasSubstr("rank 1 (pid "), HasSubstr("SIGSTOP")));
}

TEST_P(Faults, ARankThatLeavesEndsTheWait) {
  const Result result = run(2, "leave", 1, 20'000);
  const auto caught = lines_with(result.out, "caught");
  ASSERT_EQ(caught.size(), 1) << result.out << result.err;
  EXPECT_THAT(caught[0], HasSubstr("caught PeerLost lost=1"));
}

void expect_memory_left_alone(const Result& result) {
  EXPECT_GE(lines_with(result.out, "caught TimeoutError").size(), 1) << result.out << result.err;
  EXPECT_EQ(lines_with(result.out, "freed memory was left alone").size(), 2)
      << result.out << result.err;
}

TEST_P(Faults, AnAbandonedOperationWritesToNoOtherMemory) {
  expect_memory_left_alone(run(2, "give_up", 1, 60'000));
  expect_memory_left_alone(run(2, "give_up_comparing", 1, 60'000));
}

TEST_P(Faults, OperationsGoOnWithoutHandleAndGroup) {
  const Result result = run(2, "drop", 1, 20'000);
  EXPECT_EQ(lines_with(result.out, "sums 2 2").size(), 2) << result.out << result.err;
}

INSTANTIATE_TEST_SUITE_P(, Faults, ::testing::Values("shm", "gloo"),
                         [](const auto& info) { return info.param; });

#ifdef LOCKSTEP_TEST_GPU
// NCCL itself, its ranks on one GPU.
TEST(NcclFaults, AKilledRankIsNamedByEverySurvivor) {
  for (const int ranks : {2, 4}) {
    const Result result =
        lockstep_command({"run", "-n", std::to_string(ranks), "--grace", "20000", "env",
                          "LOCKSTEP_SHARE_GPU=1", kProgram, "nccl", "die", "1", "60000"});
    expect_everybody_lost(result, ranks - 1, 1);
  }
}

Result run_nccl(int ranks, const std::string& mode) {
  return lockstep_command({"run", "-n", std::to_string(ranks), "--grace", "2000", "env",
                           "LOCKSTEP_SHARE_GPU=1", kProgram, "nccl", mode, "1", "20000"});
}

TEST(NcclFaults, AStoppedRankIsNamed) {
  for (const int ranks : {2, 4}) {
    const Result result = run_nccl(ranks, "stop");
    EXPECT_EQ(lines_with(result.out, "caught TimeoutError").size(), static_cast<size_t>(ranks - 1))
        << result.out << result.err;
    EXPECT_THAT(result.last_line(), AllOf(HasSubstr("rank 1 (pid "), HasSubstr("SIGSTOP")));
  }
}

TEST(NcclFaults, ALateRankIsNamed) {
  const Result result = run_nccl(4, "late");
  EXPECT_EQ(lines_with(result.err, "rank 1 is late").size(), 1) << result.err;
}

TEST(NcclFaults, RanksThatCallDifferentThingsAreTold) {
  for (const int ranks : {2, 4}) {
    const Result result = run_nccl(ranks, "mismatch");
    EXPECT_EQ(lines_with(result.out, "caught MismatchError").size(), static_cast<size_t>(ranks))
        << result.out << result.err;
  }
}
#endif

// Ranks by twos on hosts of their own; what fails is a group that users never see.
class StrategyFaults : public ::testing::TestWithParam<std::pair<const char*, const char*>> {
 protected:
  Result run(int ranks, const std::string& mode, int victim, int timeout_ms,
             const std::string& grace = "20000") {
    const auto [backend, strategy] = GetParam();
    const std::string host =
        std::string(backend) == "shm" ? "" : "LOCKSTEP_HOST=host$((RANK / 2)) ";
    return lockstep_command({"run", "-n", std::to_string(ranks), "--grace", grace, "sh", "-c",
                             host + "GLOO_SOCKET_IFNAME=lo exec " + kProgram + " " + backend + " " +
                                 mode + " " + std::to_string(victim) + " " +
                                 std::to_string(timeout_ms) + " " + strategy});
  }
};

TEST_P(StrategyFaults, AKilledRankIsNamedByEverySurvivor) {
  expect_everybody_lost(run(4, "die", 2, 60'000), 3, 2);
}

TEST_P(StrategyFaults, ALateRankIsATimeoutForAll) {
  if (GetParam().second != std::string("hierarchical") && !tests_all()) return;
  const Result result = run(4, "late", 1, 3'500, "2000");
  const auto caught = lines_with(result.out, "caught");
  ASSERT_EQ(caught.size(), 3) << result.out << result.err;
  for (const std::string& line : caught) {
    EXPECT_THAT(line, HasSubstr("caught TimeoutError"));
    EXPECT_THAT(line, HasSubstr("all_reduce(float32[100000], sum)"));
    EXPECT_THAT(line, says("deadline"));
  }
}

INSTANTIATE_TEST_SUITE_P(, StrategyFaults,
                         ::testing::Values(std::pair("gloo", "hierarchical"),
                                           std::pair("gloo", "ring"), std::pair("shm", "tree")),
                         [](const auto& info) {
                           return std::string(info.param.first) + "_" + info.param.second;
                         });

#ifdef LOCKSTEP_MPIRUN
Result run_mpi(const std::string& mode, const std::string& timeout_ms,
               const std::string& ranks = "3") {
  Subprocess process({LOCKSTEP_MPIRUN, "--allow-run-as-root", "--oversubscribe", "-n", ranks,
                      std::string(LOCKSTEP_TEST_BIN) + "/fault_rank", "mpi", mode, "1",
                      timeout_ms});
  return process.wait(milliseconds{60'000});
}

TEST(Mpi, ALateRankIsReportedThenATimeout) {
  const Result result = run_mpi("late", "3500");
  // mpirun ends the job with the first rank that gives up, so at least one is heard.
  const auto caught = lines_with(result.out, "caught TimeoutError");
  ASSERT_GE(caught.size(), 1) << result.out << result.err;
  EXPECT_THAT(caught[0], HasSubstr("for rank 1; rank 1 has finished broadcast #3"));
  EXPECT_GE(lines_with(result.err, "has waited 2.").size(), 1) << result.err;
  EXPECT_NE(result.code, 0);
}

TEST(Mpi, AnAbandonedOperationWritesToNoOtherMemory) {
  expect_memory_left_alone(run_mpi("give_up", "60000", "2"));
  expect_memory_left_alone(run_mpi("give_up_comparing", "60000", "2"));
}

TEST(Mpi, OperationsGoOnWithoutHandleAndGroup) {
  const Result result = run_mpi("drop", "20000", "2");
  EXPECT_EQ(lines_with(result.out, "sums 2 2").size(), 2) << result.out << result.err;
}

TEST(Mpi, ADeadRankEndsTheJob) { EXPECT_NE(run_mpi("die", "60000").code, 0); }
#endif

TEST(Launcher, ADeadRankEndsTheJobWithoutHelp) {
  // Default grace: the survivors' own error and the launcher's are both within a second.
  const Result result =
      lockstep_command({"run", "-n", "3", std::string(LOCKSTEP_TEST_BIN) + "/fault_rank", "shm",
                        "die", "1", "60000"});
  EXPECT_EQ(result.code, 128 + 9);
  EXPECT_THAT(result.last_line(), HasSubstr("rank 1"));
  EXPECT_THAT(result.last_line(), HasSubstr("SIGKILL"));
}

}  // namespace
}  // namespace lockstep::test
