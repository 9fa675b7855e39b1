// SPDX-License-Identifier: Apache-2.0
// With how many threads a rank of `lockstep train` computes, whoever has started it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>

#include "tests/support/subprocess.h"

namespace lockstep::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using Words = std::vector<std::string>;

constexpr const char* kCrowded = "more compute threads";
constexpr const char* kBound = ", bound to cores";

class Threads : public testing::Test {
 protected:
  Threads() {
    std::string text;
    for (int i = 0; i < 200; ++i) text += "the line of number " + std::to_string(i) + "\n";
    write_file(folder_.path() + "/text.txt", text);
    cpu_set_t mask;
    sched_getaffinity(0, sizeof(mask), &mask);
    cores_ = CPU_COUNT(&mask);
    while (!CPU_ISSET(first_, &mask)) ++first_;
  }

  // A step of a small run, which these words start.
  Result train(Words words, const Words& options = {}, const Words& variables = {}) const {
    words.insert(words.end(), {LOCKSTEP_COMMAND, "train", "--data.path",
                               folder_.path() + "/text.txt", "--model.layers", "1",
                               "--model.hidden", "16", "--model.heads", "1", "--train.seq_len", "8",
                               "--train.micro_batch", "1", "--train.steps", "1", "--run.dir", ""});
    words.insert(words.end(), options.begin(), options.end());
    Result result = Subprocess(words, variables).wait();
    EXPECT_EQ(result.code, 0) << result.out << result.err;
    return result;
  }
  Words on_one_core() const { return {"taskset", "-c", std::to_string(first_)}; }
  static std::string each(int threads) {
    return ", " + std::to_string(threads) + (threads > 1 ? " threads each" : " thread each");
  }
  int half() const { return std::max(1, cores_ / 2); }

  TempDir folder_;
  int cores_ = 0, first_ = 0;
};

TEST_F(Threads, OneRankTakesTheCoresOfItsMask) {
  const Result result = train({});
  EXPECT_THAT(result.out, HasSubstr(each(cores_)));
  EXPECT_THAT(result.err, Not(HasSubstr(kCrowded)));
  EXPECT_THAT(train(on_one_core()).out, HasSubstr(each(1)));
}

TEST_F(Threads, MoreRanksThanCoresAreAWarning) {
  const Result two = train(on_one_core(), {"-n", "2"});
  EXPECT_THAT(two.out, HasSubstr(each(1)));
  EXPECT_THAT(two.err,
              AllOf(HasSubstr(kCrowded), HasSubstr("2 of 2 ranks"), HasSubstr("1 for 0.5 cores"),
                    Not(HasSubstr("train.threads"))));  // there is no less than one thread
}

// torchrun puts OMP_NUM_THREADS=1 into the environment of its ranks, not into its own.
TEST_F(Threads, WhatTheUserSetIsToldFromWhatTorchrunSet) {
  const Words torchrun{
      "sh", "-c", "export OMP_NUM_THREADS=1 TORCHELASTIC_RUN_ID=none; \"$@\"; exit $?", "torchrun"};
  EXPECT_THAT(train(torchrun).out, HasSubstr(each(cores_)));
  EXPECT_THAT(train(torchrun, {}, {"OMP_NUM_THREADS=1"}).out, HasSubstr(each(1)));
  const std::string more = std::to_string(cores_ + 1);
  EXPECT_THAT(train({}, {"--train.threads", more}, {"OMP_NUM_THREADS=1"}).out,
              HasSubstr(each(cores_ + 1)));
}

#ifdef LOCKSTEP_MPIRUN
TEST_F(Threads, UnderMpirunBoundRanksHaveTheirCoresAndOthersDivideThem) {
  const auto mpirun = [](const char* bind) {
    return Words{
        LOCKSTEP_MPIRUN, "--allow-run-as-root", "--oversubscribe", "--bind-to", bind, "-n", "2"};
  };
  const Result free = train(mpirun("none"));
  EXPECT_THAT(free.out, HasSubstr("2 ranks (shm)" + each(half()) + (cores_ > 1 ? kBound : "")));
  Words bound = mpirun(cores_ > 1 ? "core" : "none");
  // A core of the machine may have several of the kernel's.
  bound.insert(bound.end(),
               {"sh", "-c", "[ $OMPI_COMM_WORLD_RANK != 0 ] || nproc; exec \"$@\"", "sh"});
  const Result result = train(bound);
  EXPECT_THAT(result.out, AllOf(HasSubstr(each(cores_ > 1 ? std::stoi(result.out) : 1)),
                                Not(HasSubstr(kBound))));

  const int many = std::max(2, cores_);  // of each rank: more than there are
  const Result chosen = train(mpirun("none"), {}, {"OMP_NUM_THREADS=" + std::to_string(many)});
  EXPECT_THAT(chosen.out, HasSubstr(each(many)));
  EXPECT_THAT(chosen.out, Not(HasSubstr(kBound)));
  EXPECT_THAT(chosen.err, HasSubstr(kCrowded));
}
#endif

#ifdef LOCKSTEP_TORCHRUN_PYTHON
TEST_F(Threads, UnderTorchrun) {
  // Debian's torch 1.13 cannot read its own default of --redirects and --tee under Python 3.11.
  EXPECT_THAT(train({LOCKSTEP_TORCHRUN_PYTHON, "-m", "torch.distributed.run", "--standalone",
                     "--nproc_per_node", "2", "--redirects", "1", "--tee", "1", "--no_python"})
                  .out,
              HasSubstr("2 ranks (shm)" + each(half())));
}
#endif

}  // namespace
}  // namespace lockstep::test
