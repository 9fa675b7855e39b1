// SPDX-License-Identifier: Apache-2.0
#include "lockstep/io/folder_lock.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <optional>

#include "lockstep/core/format.h"
#include "lockstep/io/durable.h"
#include "tests/formats/save.h"
#include "tests/support/says.h"
#include "tests/support/subprocess.h"

namespace lockstep::io {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

class Lock : public ::testing::Test {
 protected:
  void write(const LockOwner& owner) const { test::write_file(file_, owner.text()); }
  void set_age(int seconds) const {
    timespec times[2] = {};
    clock_gettime(CLOCK_REALTIME, &times[0]);
    times[0].tv_sec -= seconds;
    times[1] = times[0];
    ASSERT_EQ(utimensat(AT_FDCWD, file_.c_str(), times, 0), 0);
  }

  const test::TempDir temp_;
  const std::string dir_ = temp_.path() + "/checkpoints";
  const std::string file_ = dir_ + "/.lock";
};

TEST_F(Lock, RefusesTheSecondAndNamesTheFirst) {
  {
    const FolderLock first(dir_);
    const std::string owner = format("pid {} ... {}", getpid(), first.owner().host);
    const auto named = test::says(dir_ + " ... job ... " + owner + " ... " + first.owner().since);
    EXPECT_THAT([&] { FolderLock second(dir_); }, ThrowsMessage<ConfigError>(named));
    EXPECT_THAT([&] { FolderLock::require_free(dir_); }, ThrowsMessage<ConfigError>(named));
    EXPECT_THAT([&] { formats::check_writable(dir_); }, ThrowsMessage<ConfigError>(named));
    EXPECT_NO_THROW(first.require_held());
  }
  EXPECT_FALSE(fs::exists(file_));
  FolderLock::require_free(dir_);
  const FolderLock again(dir_);
  EXPECT_EQ(again.owner().generation, 1);
}

TEST_F(Lock, OfAKilledProcessIsTakenOver) {
  for (int64_t generation = 2; generation <= 4; ++generation) {
    int ends[2];
    ASSERT_EQ(pipe(ends), 0);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      std::optional<FolderLock> lock;
      lock.emplace(dir_);
      if (::write(ends[1], "t", 1) != 1) _exit(1);
      pause();
      _exit(1);
    }
    close(ends[1]);
    char byte = 0;
    ASSERT_EQ(::read(ends[0], &byte, 1), 1);
    close(ends[0]);
    EXPECT_THROW(FolderLock::require_free(dir_), ConfigError);
    kill(child, SIGKILL);
    // The owner must be dead, not reaped: the one who takes over is seldom its parent.
    siginfo_t info{};
    ASSERT_EQ(waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT), 0);
    {
      const FolderLock next(dir_);
      EXPECT_EQ(next.owner().generation, 2);
      EXPECT_NO_THROW(next.require_held());
    }
    waitpid(child, nullptr, 0);
  }
}

TEST_F(Lock, OfAnotherHostEndsWithItsLease) {
  make_folders(dir_);
  LockOwner other = LockOwner::self();
  other.host = "elsewhere";
  other.boot = "another-boot";
  other.generation = 7;
  write(other);
  EXPECT_THAT(
      [&] { FolderLock lock(dir_); },
      ThrowsMessage<ConfigError>(AllOf(HasSubstr("on host elsewhere"), HasSubstr("30 seconds"))));
  EXPECT_THROW(FolderLock::require_free(dir_), ConfigError);
  set_age(31);
  FolderLock::require_free(dir_);
  const FolderLock lock(dir_);
  EXPECT_EQ(lock.owner().generation, 8);
}

// Of this host nothing is asked but whether the process lives: another has its number now.
TEST_F(Lock, OfANumberThatIsUsedAgainIsTakenOver) {
  make_folders(dir_);
  LockOwner before = LockOwner::self();
  --before.start;
  write(before);
  const FolderLock lock(dir_);
  EXPECT_EQ(lock.owner().generation, 2);
}

TEST_F(Lock, AWriterWhoseLockWasTakenOverCommitsNothing) {
  const FolderLock zombie(dir_);
  formats::begin_checkpoint(dir_, 1);
  const std::vector<formats::ShardSlice> slices = {{"w", "F32", {2}, {{{0, 2}}}}};
  const auto file = formats::shard_file_name(1);
  const auto record =
      formats::test_support::write_shard(dir_ + "/step-00000001.tmp", file, slices, 1);
  const auto manifest = formats::shard_manifest(1, file, record, slices);
  LockOwner other = LockOwner::self();
  other.host = "elsewhere";
  other.generation = 2;
  {
    // In place, as another host does it.
    const Fd fd(open(file_.c_str(), O_WRONLY | O_TRUNC | O_CLOEXEC));
    const std::string text = other.text();
    ASSERT_EQ(::write(fd.get(), text.data(), text.size()), static_cast<ssize_t>(text.size()));
  }
  EXPECT_THAT([&] { formats::commit_checkpoint(dir_, manifest, &zombie); },
              ThrowsMessage<LockLost>(AllOf(HasSubstr("elsewhere"), HasSubstr("generation 2"),
                                            HasSubstr("generation 1"))));
  EXPECT_TRUE(formats::list_complete(dir_).empty());
  EXPECT_TRUE(fs::exists(dir_ + "/step-00000001.tmp"));
  // Nor when the other has given it back.
  fs::remove(file_);
  EXPECT_THROW(formats::commit_checkpoint(dir_, manifest, &zombie), LockLost);
  EXPECT_TRUE(formats::list_complete(dir_).empty());
}

TEST_F(Lock, OfAFolderThatWasMovedAwayIsTakenAgain) {
  FolderLock lock(dir_);
  fs::rename(dir_, temp_.path() + "/moved");
  EXPECT_THROW(lock.require_held(), LockLost);
  lock.renew();
  lock.require_held();
  EXPECT_TRUE(fs::exists(file_));
  fs::remove(file_);
  EXPECT_THROW(lock.renew(), LockLost);
}

TEST_F(Lock, IsARegularFile) {
  make_folders(dir_);
  ASSERT_EQ(mkfifo(file_.c_str(), 0600), 0);
  EXPECT_THAT([&] { FolderLock lock(dir_); }, ThrowsMessage<ConfigError>(HasSubstr(file_)));
  fs::remove(file_);
  test::write_file(file_, "what somebody left");
  const FolderLock lock(dir_);
  EXPECT_EQ(lock.owner().generation, 1);
}

}  // namespace
}  // namespace lockstep::io
