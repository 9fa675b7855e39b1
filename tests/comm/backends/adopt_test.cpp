// SPDX-License-Identifier: Apache-2.0
// Programs that have communicators of their own, as processes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>

#include "tests/support/says.h"
#include "tests/support/subprocess.h"

namespace lockstep::test {
namespace {

using ::testing::HasSubstr;

const std::string kProgram = std::string(LOCKSTEP_TEST_BIN) + "/adopt_rank";

// Ranks of a c10d group, started without a launcher. The last one has these variables too.
std::vector<Result> run_gloo(int size, const std::string& what = "",
                             const std::vector<std::string>& variables = {}) {
  const TempDir folder;
  std::vector<std::unique_ptr<Subprocess>> ranks;
  for (int rank = 0; rank < size; ++rank) {
    std::vector<std::string> words{kProgram, "gloo", std::to_string(rank), std::to_string(size),
                                   folder.path() + "/meet"};
    if (!what.empty()) words.push_back(what);
    std::vector<std::string> all{"OMP_NUM_THREADS=1"};
    if (rank == size - 1) all.insert(all.end(), variables.begin(), variables.end());
    ranks.push_back(std::make_unique<Subprocess>(words, all));
  }
  std::vector<Result> results;
  for (auto& rank : ranks) results.push_back(rank->wait(milliseconds{120'000}));
  return results;
}

TEST(AdoptProcessGroup, PassesTheConformanceChecks) {
  const auto results = run_gloo(3);
  for (const Result& result : results) EXPECT_EQ(result.code, 0) << result.err;
  for (int rank = 0; rank < 3; ++rank) {
    const std::string r = std::to_string(rank);
    EXPECT_THAT(results[static_cast<size_t>(rank)].out,
                HasSubstr("rank " + r + " of 3, local " + r +
                          " of 3, backend gloo, all checks hold, mean gradient 2.0"));
  }
}

TEST(AdoptProcessGroup, MakesAGroupOfItsRanksOverAnotherBackend) {
  for (const Result& result : run_gloo(2, "shm")) {
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_THAT(result.out, HasSubstr("of 2, backend shm, all checks hold, mean gradient 1.0"));
  }
}

TEST(AdoptProcessGroup, ADeadRankIsNamed) {
  const auto results = run_gloo(3, "die");
  for (size_t rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(results[rank].code, 3);
    EXPECT_THAT(results[rank].err, HasSubstr("lost rank 2: [all_reduce]"));
  }
}

TEST(AdoptProcessGroup, AllRanksSayWhyOneCannotTakePart) {
  const auto results = run_gloo(3, "", {"LOCKSTEP_TIMEOUT=soon"});
  const std::string reason = "LOCKSTEP_TIMEOUT=soon ... seconds above 0";
  for (const Result& result : results) EXPECT_EQ(result.code, 2) << result.err;
  for (const size_t rank : {0, 1})
    EXPECT_THAT(results[rank].err, says("[init] ... rank 2 ... " + reason));
  EXPECT_THAT(results[2].err, says("config error: ... " + reason));
}

TEST(AdoptProcessGroup, BadInput) {
  EXPECT_THAT(run_gloo(1, "null")[0].err, says("config error: [adopt] ... null"));
  EXPECT_THAT(run_gloo(1, "pigeon")[0].err, HasSubstr("unknown backend 'pigeon'"));
  EXPECT_THAT(run_gloo(1, "thread")[0].err, HasSubstr("use run_threads"));
}

#ifdef LOCKSTEP_MPIRUN
Result run_mpi(int size, const std::string& what) {
  Subprocess process({LOCKSTEP_MPIRUN, "--allow-run-as-root", "--oversubscribe", "-n",
                      std::to_string(size), kProgram, "mpi", what},
                     {"OMP_NUM_THREADS=1"});
  return process.wait(milliseconds{120'000});
}

TEST(AdoptMpiComm, PassesTheConformanceChecks) {
  // Its own name means the same as "auto": a new group would need MPI's whole world.
  const Result result = run_mpi(4, "mpi");
  EXPECT_EQ(result.code, 0) << result.err;
  // The communicator has its own ranks, 3 of the 4 that mpirun started; the fourth is alone.
  for (int rank = 0; rank < 3; ++rank) {
    const std::string r = std::to_string(rank);
    EXPECT_THAT(result.out, HasSubstr("rank " + r + " of 3, local " + r +
                                      " of 3, backend mpi, all checks hold, mean gradient 2.0"));
  }
  EXPECT_THAT(result.out, HasSubstr("rank 0 of 1, local 0 of 1, backend none, all checks hold"));
}

TEST(AdoptMpiComm, MakesAGroupOfItsRanksOverAnotherBackend) {
  const Result result = run_mpi(3, "shm");
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("rank 1 of 2, local 1 of 2, backend shm, all checks hold"));
}

TEST(AdoptMpiComm, BadInput) {
  EXPECT_THAT(run_mpi(1, "null").err, HasSubstr("the communicator is MPI_COMM_NULL"));
  EXPECT_THAT(run_mpi(1, "single").err, HasSubstr("needs MPI_THREAD_MULTIPLE"));
  EXPECT_THAT(run_mpi(1, "unstarted").err, says("MPI ... not been started"));
}
#endif

}  // namespace
}  // namespace lockstep::test
