// Saves that are cut off at every call that reaches the disk: the last complete checkpoint is
// always there, and the next save succeeds.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>

#include "lockstep/core/error.h"
#include "tests/formats/faulty_io.h"
#include "tests/formats/save.h"
#include "tests/support/subprocess.h"

namespace lockstep::formats {
namespace {

namespace fs = std::filesystem;
using io::Fault;
using test_support::save;

// How far a run came, also for the parent of a process that was killed.
struct Progress {
  int64_t newest = 0;  // the newest committed step
  int committed = 0;   // commits
};

// New steps, old ones removed, a step replaced, and one that is older than the newest.
void run(const std::string& dir, Progress& progress) {
  const auto commit = [&](int64_t step, int seed) {
    save(dir, step, seed);
    progress.newest = std::max(progress.newest, step);
    ++progress.committed;
  };
  for (int64_t step = 1; step <= 2; ++step) {
    commit(step, 1);
    prune(dir, 1);
  }
  commit(2, 2);
  commit(1, 2);
  commit(3, 2);
  prune(dir, 1);
}

// Whatever counts as complete must be whole, and nothing committed may be lost.
void expect_sound(const std::string& dir, const Progress& progress) {
  for (const auto& checkpoint : list_complete(dir)) {
    ASSERT_NO_THROW(ASSERT_EQ(verify(checkpoint.path).step, checkpoint.step));
  }
  const auto found = newest(dir);
  ASSERT_TRUE(found || progress.committed == 0);
  ASSERT_GE(found ? found->step : 0, progress.newest);
}

void expect_retry(const std::string& dir) {
  io::arm(Fault::none, 0);
  for (int64_t step = 2; step <= 3; ++step) ASSERT_NO_THROW(save(dir, step, 3));
  ASSERT_NO_THROW(prune(dir, 1));
  ASSERT_EQ(verify(newest(dir)->path).state.at("seed"), "3");
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(dir)) names.push_back(entry.path().filename());
  ASSERT_THAT(names, ::testing::ElementsAre("step-00000003"));
}

class Crash : public ::testing::TestWithParam<Fault> {};

TEST_P(Crash, AtEveryCall) {
  auto* const progress = static_cast<Progress*>(
      mmap(nullptr, sizeof(Progress), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(progress, MAP_FAILED);
  bool finished = false;
  int call = 0;
  while (!finished) {
    const test::TempDir temp;
    const auto dir = temp.path() + "/checkpoints";
    *progress = {};
    ++call;
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      io::arm(GetParam(), call);
      run(dir, *progress);
      _exit(0);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status));
    finished = WEXITSTATUS(status) == 0;
    ASSERT_EQ(WEXITSTATUS(status), finished ? 0 : 137);
    SCOPED_TRACE(testing::Message()
                 << "call " << call << ", after " << progress->committed << " commits");
    ASSERT_NO_FATAL_FAILURE(expect_sound(dir, *progress));
    ASSERT_NO_FATAL_FAILURE(expect_retry(dir));
  }
  EXPECT_GT(call, 120);
  munmap(progress, sizeof(Progress));
}

INSTANTIATE_TEST_SUITE_P(All, Crash,
                         ::testing::Values(Fault::kill, Fault::data_lost, Fault::all_lost));

TEST(Failure, AtEveryCall) {
  for (int call = 1;; ++call) {
    const test::TempDir temp;
    const auto dir = temp.path() + "/checkpoints";
    Progress progress;
    io::arm(Fault::fail, call);
    SCOPED_TRACE(testing::Message() << "call " << call);
    try {
      run(dir, progress);
      ASSERT_LT(io::calls(), call);
      ASSERT_GT(call, 120);
      return;
    } catch (const SystemError& failure) {
      ASSERT_THAT(failure.what(), ::testing::HasSubstr(dir.substr(0, dir.rfind('/'))));
      ASSERT_TRUE(failure.error_number() == EIO || failure.error_number() == ENOSPC);
    }
    ASSERT_NO_FATAL_FAILURE(expect_sound(dir, progress));
    ASSERT_NO_FATAL_FAILURE(expect_retry(dir));
  }
}

TEST(Failure, ShortWrites) {
  const test::TempDir temp;
  Progress progress;
  io::arm(Fault::trickle, 1);
  run(temp.path(), progress);
  EXPECT_GT(io::calls(), 400);
  expect_sound(temp.path(), progress);
}

}  // namespace
}  // namespace lockstep::formats
