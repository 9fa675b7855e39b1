// SPDX-License-Identifier: Apache-2.0
// Saves that are cut off at every call that reaches the disk, or at any moment: the last complete
// checkpoint is always there, and the next save succeeds.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "lockstep/core/clock.h"
#include "lockstep/core/error.h"
#include "lockstep/formats/checkpoint_reader.h"
#include "tests/formats/memory_dir.h"
#include "tests/formats/save.h"
#include "tests/io/faulty_io.h"
#include "tests/support/subprocess.h"

namespace lockstep::formats {
namespace {

namespace fs = std::filesystem;
using io::calls::Fault;
using test_support::save;

// How far a run came, also for the parent of a process that was killed.
struct Progress {
  int64_t newest = 0;  // the newest committed step
  int committed = 0;   // commits
};

// New steps, old ones removed, a step replaced, one that is older than the newest, and a save that
// is given up.
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
  test_support::write_shard(begin_checkpoint(dir, 3), "f", {{"w", "F32", {8}, {{{0, 8}}}}}, 0);
  abandon_checkpoint(dir, 3);
  prune(dir, 1);
}

// Whatever counts as complete must be whole, and nothing committed may be lost.
void expect_sound(const std::string& dir, const Progress& progress) {
  for (const auto& checkpoint : list_complete(dir)) {
    ASSERT_NO_THROW(ASSERT_EQ(verify(checkpoint.path).step, checkpoint.step));
  }
  const auto found = newest_complete(dir);
  ASSERT_TRUE(found || progress.committed == 0);
  ASSERT_GE(found ? found->step : 0, progress.newest);
}

void expect_retry(const std::string& dir) {
  io::calls::arm(Fault::none, 0);
  for (int64_t step = 2; step <= 3; ++step) ASSERT_NO_THROW(save(dir, step, 3));
  ASSERT_NO_THROW(prune(dir, 1));
  ASSERT_EQ(verify(newest_complete(dir)->path).state.at("seed"), "3");
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(dir)) names.push_back(entry.path().filename());
  ASSERT_THAT(names, ::testing::ElementsAre("step-00000003"));
}

class Crash : public ::testing::TestWithParam<Fault> {};

TEST_P(Crash, ACrashAtAnySystemCallLeavesSoundCheckpoints) {
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
      io::calls::arm(GetParam(), call);
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

// What the processes of a save share, and the test with them.
struct Shared {
  std::atomic<int64_t> committed;  // the newest step that is
  std::atomic<int> commits;
  char parts[2][2000];  // of the manifest
};

const layout::Shape kShape = {300, 1000};
const std::vector<ShardSlice> kShards[2] = {
    {{"w", "I32", kShape, {{{0, 20}, {0, 1000}}}}},
    {{"w", "I32", kShape, {{{20, 300}, {0, 1000}}}}, {"b", "I32", {7}, {{{0, 7}}}}}};

// Values, so that every save has others.
int32_t first_number(int64_t step, int seed) { return static_cast<int32_t>(step * 2 + seed); }

// Two processes write a shard each, one of them of two blocks, and this one commits.
void save_by_processes(const std::string& dir, int64_t step, int seed, Shared& shared) {
  const auto folder = begin_checkpoint(dir, step);
  pid_t writers[2];
  for (int rank = 0; rank < 2; ++rank) {
    writers[rank] = fork();
    if (writers[rank] != 0) continue;
    const auto file = shard_file_name(rank + 1);
    const auto record =
        test_support::write_numbers(folder, file, kShards[rank], first_number(step, seed));
    const auto text = shard_manifest(step, file, record, kShards[rank]).to_json();
    std::strncpy(shared.parts[rank], text.c_str(), sizeof shared.parts[rank] - 1);
    _exit(0);
  }
  Manifest manifest{.step = step, .state = {{"seed", std::to_string(seed)}}};
  for (int rank = 0; rank < 2; ++rank) {
    int status = 0;
    if (waitpid(writers[rank], &status, 0) != writers[rank] || status != 0) _exit(4);
    manifest.merge(Manifest::part_from_json(shared.parts[rank], "part"));
  }
  commit_checkpoint(dir, manifest);
  shared.committed = std::max<int64_t>(shared.committed, step);
  ++shared.commits;
}

void expect_values(const std::string& path) {
  CheckpointReader reader(path);
  const auto first =
      first_number(reader.manifest().step, std::stoi(reader.manifest().state.at("seed")));
  for (const auto& [name, record] : reader.manifest().tensors) {
    std::vector<int32_t> values(static_cast<size_t>(layout::numel_of(record.shape)));
    reader.read(name, layout::Box::whole(record.shape), std::as_writable_bytes(std::span(values)));
    std::vector<int32_t> expected(values.size());
    std::iota(expected.begin(), expected.end(), first);
    ASSERT_TRUE(values == expected) << path << " " << name;
  }
}

// Each step is saved twice, so that checkpoints are replaced too; old ones are removed.
void save_for_ever(const std::string& dir, int64_t step, Shared& shared) try {
  for (;; ++step) {
    for (int seed = 1; seed <= 2; ++seed) {
      save_by_processes(dir, step, seed, shared);
      prune(dir, 2);
    }
  }
} catch (const std::exception& failure) {
  std::fprintf(stderr, "%s\n", failure.what());
  _exit(5);
}

TEST(KilledSave, AtAnyMomentLeavesSoundCheckpoints) {
  auto* const shared = static_cast<Shared*>(
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(shared, MAP_FAILED);
  const test_support::MemoryDir temp;
  const auto dir = temp.path() + "/checkpoints";
  const auto seed = std::random_device{}();
  std::mt19937 random(seed);
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  io::calls::arm(Fault::none, 0);
  const auto start = Clock::now();
  for (int64_t step = 1; step <= 5; ++step) save_by_processes(dir, step, 1, *shared);
  // Two saves: some 10 ms, and up to fifty times that with a sanitizer on a busy machine.
  const auto took = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - start);
  const auto longest = std::min<int64_t>(took.count() * 2 / 5, 600'000);
  int64_t next = 1;
  for (int round = 0; round < 200; ++round) {
    SCOPED_TRACE(testing::Message() << "round " << round);
    int ends[2];
    ASSERT_EQ(pipe(ends), 0);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      // A group of their own. Each holds an end of the pipe until it is gone.
      setpgid(0, 0);
      close(ends[0]);
      if (::write(ends[1], "s", 1) != 1) _exit(4);
      save_for_ever(dir, next, *shared);
    }
    close(ends[1]);
    char byte = 0;
    ASSERT_EQ(::read(ends[0], &byte, 1), 1);
    usleep(static_cast<useconds_t>(random() % longest));
    ASSERT_EQ(kill(-child, SIGKILL), 0);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << "the saving process ended by itself: " << status;
    ASSERT_EQ(::read(ends[0], &byte, 1), 0);
    close(ends[0]);

    for (const auto& checkpoint : list_complete(dir)) {
      ASSERT_NO_THROW(ASSERT_EQ(verify(checkpoint.path).step, checkpoint.step));
      ASSERT_NO_FATAL_FAILURE(expect_values(checkpoint.path));
    }
    const auto found = newest_complete(dir);
    ASSERT_GE(found ? found->step : 0, shared->committed);
    next = (found ? found->step : 0) + (round % 2);  // again, or the one after it
    if (round % 10 == 9) {
      save_by_processes(dir, next, 3, *shared);
      prune(dir, 1);
      ASSERT_NO_FATAL_FAILURE(expect_values(newest_complete(dir)->path));
      ASSERT_EQ(std::distance(fs::directory_iterator(dir), {}), 1);
    }
  }
  EXPECT_GT(shared->commits, 5 + 20);  // more than this process made
  munmap(shared, sizeof(Shared));
}

TEST(CheckpointFailure, AFailureOfAnySystemCallLeavesSoundCheckpoints) {
  for (int call = 1;; ++call) {
    const test::TempDir temp;
    const auto dir = temp.path() + "/checkpoints";
    Progress progress;
    io::calls::arm(Fault::fail, call);
    SCOPED_TRACE(testing::Message() << "call " << call);
    try {
      run(dir, progress);
      ASSERT_LT(io::calls::count(), call);
      ASSERT_GT(call, 120);
      return;
    } catch (const SystemError& failure) {
      ASSERT_THAT(failure.what(), ::testing::HasSubstr(dir.substr(0, dir.rfind('/'))));
      ASSERT_TRUE(failure.error_number() == EIO || failure.error_number() == ENOSPC);
    }
    ASSERT_NO_FATAL_FAILURE(expect_sound(dir, progress));
    io::calls::arm(Fault::none, 0);
    for (int64_t step = 1; step <= 3; ++step) {
      ASSERT_NO_THROW(abandon_checkpoint(dir, step));
      for (const char* end : {".tmp", ".old"}) {
        ASSERT_FALSE(fs::exists(dir + "/" + step_folder_name(step) + end));
      }
    }
    ASSERT_NO_FATAL_FAILURE(expect_sound(dir, progress));
    ASSERT_NO_FATAL_FAILURE(expect_retry(dir));
  }
}

TEST(CheckpointFailure, ShortWritesAreCompleted) {
  const test::TempDir temp;
  Progress progress;
  io::calls::arm(Fault::trickle, 1);
  run(temp.path(), progress);
  EXPECT_GT(io::calls::count(), 400);
  expect_sound(temp.path(), progress);
}

}  // namespace
}  // namespace lockstep::formats
