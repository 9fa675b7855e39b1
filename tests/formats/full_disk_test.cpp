// SPDX-License-Identifier: Apache-2.0
// Disks that are full and folders that cannot be written, as the system has them: a save fails with
// the path and the reason, gives its space back, and leaves what was complete.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "lockstep/core/error.h"
#include "tests/formats/save.h"
#include "tests/support/child_process.h"
#include "tests/support/subprocess.h"

namespace lockstep::formats {
namespace {

namespace fs = std::filesystem;
using layout::Box;
using test::in_a_process;
using test_support::save_numbers;

constexpr rlim_t kDiskSpace = rlim_t{1} << 20;

std::vector<std::vector<ShardSlice>> tensor_of(int64_t kilobytes) {
  return {{{"w", "I32", {kilobytes, 256}, Box::whole({kilobytes, 256})}}};
}

// Saves what fits, then what does not, in a folder with room for kDiskSpace.
std::string save_too_much(const std::string& dir, int expected) {
  save_numbers(dir, 1, tensor_of(200));
  try {
    save_numbers(dir, 2, tensor_of(1800));
    return "a full disk was not noticed";
  } catch (const SystemError& failure) {
    const std::string text = failure.what();
    if (failure.error_number() != expected) return text;
    if (text.find(dir + "/step-00000002.tmp/shard-") == std::string::npos) return text;
  }
  abandon_checkpoint(dir, 2);
  if (fs::exists(dir + "/step-00000002.tmp")) return "what was written is still there";
  if (verify(newest_complete(dir)->path).step != 1) return "the one before is gone";
  // There is room again.
  save_numbers(dir, 2, tensor_of(600));
  if (verify(newest_complete(dir)->path).step != 2) return "the next is not the newest";
  return "";
}

// Writes fail in the middle of a file, whatever the disk.
TEST(FullDisk, AFileSizeLimitLeavesSoundCheckpoints) {
  const test::TempDir temp;
  EXPECT_EQ(in_a_process([&]() -> std::string {
              const rlimit limit{kDiskSpace, kDiskSpace};
              if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return "setrlimit";
              return save_too_much(temp.path() + "/checkpoints", EFBIG);
            }),
            "");
}

// A file system of kDiskSpace, where this process may mount one; a limit of its files' size
// elsewhere.
TEST(FullDisk, AFullFileSystemLeavesSoundCheckpoints) {
  const test::TempDir temp;
  EXPECT_EQ(in_a_process([&]() -> std::string {
              if ((unshare(CLONE_NEWNS) == 0 || unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0) &&
                  mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
                  mount("none", temp.path().c_str(), "tmpfs", 0, "size=1m") == 0) {
                return save_too_much(temp.path() + "/checkpoints", ENOSPC);
              }
              std::puts("no file system could be mounted");
              const rlimit limit{kDiskSpace, kDiskSpace};
              if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return "setrlimit";
              return save_too_much(temp.path() + "/checkpoints", EFBIG);
            }),
            "");
}

TEST(FullDisk, AFolderThatCannotBeWrittenIsNamed) {
  const test::TempDir temp;
  const auto dir = temp.path() + "/checkpoints";
  save_numbers(dir, 1, tensor_of(1));
  ASSERT_EQ(chmod(temp.path().c_str(), 0755), 0);
  ASSERT_EQ(chmod(dir.c_str(), 0555), 0);
  EXPECT_EQ(in_a_process([&]() -> std::string {
              // To root everything can be written.
              if (geteuid() == 0 && setuid(65534) != 0) return "setuid";
              try {
                save_numbers(dir, 2, tensor_of(1));
                return "was written";
              } catch (const SystemError& failure) {
                if (failure.error_number() != EACCES) return failure.what();
              }
              try {
                check_writable(dir);
                return "could be written";
              } catch (const ConfigError& failure) {
                const std::string text = failure.what();
                if (text.find("checkpoint folder " + dir) == std::string::npos) return text;
              }
              if (verify(newest_complete(dir)->path).step != 1) return "the one before is gone";
              return "";
            }),
            "");
  ASSERT_EQ(chmod(dir.c_str(), 0755), 0);
}

}  // namespace
}  // namespace lockstep::formats
