// SPDX-License-Identifier: Apache-2.0
#include "lockstep/io/line_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>

#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "tests/support/subprocess.h"

namespace lockstep::io {
namespace {

TEST(LineFile, AppendsWholeLines) {
  const test::TempDir folder;
  const std::string path = folder.path() + "/a";
  test::write_file(path, "old\n");
  LineFile(path).write("new");
  EXPECT_EQ(test::read_file(path), "old\nnew\n");
  LineFile().write("nowhere");
}

TEST(LineFile, RefusesAFolderThatIsNotThere) { EXPECT_THROW(LineFile("/dev/null/a"), SystemError); }

// A disk that is full, by the limit of a file's size: the line that does not fit is lost, the
// program goes on, and what is written later is whole.
TEST(LineFile, SurvivesAFullDisk) {
  const test::TempDir folder;
  const std::string path = folder.path() + "/a";
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  LineFile file(path);
  // As the events of a run: its warnings are lines too.
  log::observe_warnings([&](const std::string&) { file.write("warning"); });
  const std::string one(10'000, '1');  // the warning goes to a file too, in this test
  file.write(one);
  const rlimit tight{one.size() + 3, before.rlim_max};
  testing::internal::CaptureStderr();
  setrlimit(RLIMIT_FSIZE, &tight);
  file.write("twotwo");
  file.write("three");
  setrlimit(RLIMIT_FSIZE, &before);
  log::observe_warnings(nullptr);
  const std::string warnings = testing::internal::GetCapturedStderr();
  file.write("four");
  EXPECT_EQ(test::read_file(path), one + "\ntw\nfour\n");
  EXPECT_THAT(warnings, testing::HasSubstr(path));
  EXPECT_EQ(std::count(warnings.begin(), warnings.end(), '\n'), 1) << warnings;
}

}  // namespace
}  // namespace lockstep::io
