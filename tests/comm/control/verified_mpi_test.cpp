// SPDX-License-Identifier: Apache-2.0
// The same under MPI, whose ranks are processes; each counts as a host.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

#include "tests/support/sampling.h"
#include "tests/support/says.h"
#include "tests/support/subprocess.h"

#ifdef LOCKSTEP_MPIRUN
namespace lockstep::test {
namespace {

using ::testing::HasSubstr;

Result run_mpi(int ranks, const std::vector<std::string>& program,
               const std::vector<std::string>& variables = {}) {
  std::vector<std::string> words{LOCKSTEP_MPIRUN, "--allow-run-as-root", "--oversubscribe"};
  for (int rank = 0; rank < ranks; ++rank) {
    if (rank > 0) words.push_back(":");
    for (const std::string& word : {std::string("-n"), std::string("1"), std::string("-x"),
                                    "LOCKSTEP_HOST=h" + std::to_string(rank)})
      words.push_back(word);
    words.insert(words.end(), program.begin(), program.end());
  }
  return Subprocess(words, variables).wait();
}

const std::string kRank = std::string(LOCKSTEP_TEST_BIN) + "/verified_rank";

TEST(VerifiedMpi, AFlippedBitIsFound) {
  std::istringstream operations(Subprocess({kRank}).wait().out);
  std::string name;
  int num_runs = 0;
  // Of large ones those that have a second step. The last piece is data, but for a barrier.
  for (int pieces = 0; operations >> name >> pieces;) {
    if (name.ends_with("_large") && pieces <= 2) continue;
    if (num_runs++ % 5 != 0 && !tests_all()) continue;
    SCOPED_TRACE(name);
    const Result result =
        run_mpi(2, {kRank, "mpi", name},
                {"LOCKSTEP_FAULT=rank=0,message=" + std::to_string(pieces) + ",action=flip:777"});
    EXPECT_NE(result.code, 0);
    EXPECT_THAT(result.out, says("rank 0: damaged by rank 1: ... rank 0 of group 'world' ... rank "
                                 "1 of the job, host ... arrived damaged"));
    EXPECT_THAT(result.out, ::testing::Not(HasSubstr("something else"))) << result.err;
  }
  EXPECT_EQ(num_runs, 13);
}

TEST(VerifiedMpi, UnharmedOperationsEndWell) {
  const Result result =
      run_mpi(3, {std::string(LOCKSTEP_TEST_BIN) + "/lockstep", "selftest", "--backend", "mpi"});
  // The status of mpirun tells only that ranks left MPI unfinished, as some of the checks ask.
  EXPECT_THAT(result.out, HasSubstr("backend mpi, 3 ranks"));
  EXPECT_THAT(result.out, HasSubstr("all hold")) << result.err;
}

}  // namespace
}  // namespace lockstep::test
#endif
