// SPDX-License-Identifier: Apache-2.0
// What ranks print: whole lines with their names, nothing lost, kept in files, and nobody to read
// it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <map>
#include <sstream>

#include "tests/support/subprocess.h"

namespace lockstep::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;

Result run_with_input(int ranks, const std::string& script,
                      const std::vector<std::string>& options = {}, const std::string& in = {}) {
  return Subprocess(run_script(ranks, script, options), {}, in).wait();
}

TEST(LauncherOutput, LinesCarryTheirRankAndKeepTheirStream) {
  const Result result = run_with_input(2, "echo out; echo err >&2; echo; printf 'no end'");
  EXPECT_EQ(result.code, 0);
  for (const std::string name : {"[rank0]: ", "[rank1]: "}) {
    EXPECT_THAT(result.out, AllOf(HasSubstr(name + "out\n"), HasSubstr(name + "\n"),
                                  HasSubstr(name + "no end\n")));
    EXPECT_THAT(result.err, HasSubstr(name + "err\n"));
  }
  EXPECT_THAT(result.out, Not(HasSubstr("err")));
}

TEST(LauncherOutput, LinesOfManyRanksStayWhole) {
  // Long lines written in pieces, stdout and stderr into one pipe that fills because its reader
  // starts late, from four ranks at once.
  const std::string script =
      "for i in 1 2 3 4 5 6 7 8; do printf \"%s-$RANK-%08000d-\" begin $RANK; printf 'end\\n'; "
      "printf \"%s-$RANK-%05000d-\" begin $RANK >&2; printf 'end\\n' >&2; done";
  const Result result = Subprocess({"sh", "-c",
                                    std::string(LOCKSTEP_COMMAND) + " run -n 4 sh -c '" +
                                        "eval \"$SCRIPT\"" + "' 2>&1 | (sleep 0.3; cat)"},
                                   {"SCRIPT=" + script})
                            .wait();
  std::istringstream lines(result.out);
  std::map<std::string, int> counts;
  for (std::string line; std::getline(lines, line);) {
    const std::string rank = line.substr(5, 1);
    EXPECT_EQ(line.substr(0, 18), "[rank" + rank + "]: begin-" + rank + "-0") << line.substr(0, 40);
    EXPECT_EQ(line.substr(line.size() - 5), rank + "-end");
    EXPECT_TRUE(line.size() == 8'021 || line.size() == 5'021) << line.size();
    ++counts[rank];
  }
  EXPECT_THAT(counts, (std::map<std::string, int>{{"0", 16}, {"1", 16}, {"2", 16}, {"3", 16}}));
}

TEST(LauncherOutput, AHalfWrittenLineIsFinishedBeforeTheOtherStreamsTurn) {
  // The long line fills the pipe, whose reader starts late, before the short one comes.
  const Result result = Subprocess({"sh", "-c",
                                    std::string(LOCKSTEP_COMMAND) +
                                        " run -n 1 sh -c 'printf %0300000d\\\\n 0 >&2; echo short' "
                                        "2>&1 | (sleep 0.3; cat)"})
                            .wait();
  EXPECT_EQ(result.out, "[rank0]: " + std::string(300'000, '0') + "\n[rank0]: short\n");
}

TEST(LauncherOutput, NothingIsLostOrChanged) {
  // 2 MB in one line, then bytes that are not text.
  const Result result =
      run_with_input(1, "head -c 2000000 /dev/zero | tr '\\0' x; echo; printf 'a\\0b\\377\\rc\\n'");
  EXPECT_EQ(result.out, "[rank0]: " + std::string(2'000'000, 'x') +
                            "\n[rank0]: " + std::string("a\0b\xff\rc\n", 7));
  const Result many = run_with_input(2, "seq 1 50000; kill -9 $$");
  size_t lines = 0;
  for (const char c : many.out) lines += c == '\n';
  EXPECT_GE(lines, 50'000u);  // all of the rank that died first
  EXPECT_THAT(many.out, HasSubstr("]: 50000\n"));
}

TEST(LauncherOutput, FilesKeepTheBytesAsTheyAre) {
  const TempDir dir;
  const std::string logs = dir.path() + "/new/logs";
  const Result result = run_with_input(
      2, "printf 'out %s' $RANK; printf 'err\\0%s\\n' $RANK >&2; exit $RANK", {"--log-dir", logs});
  EXPECT_EQ(result.code, 1);
  for (const std::string rank : {"0", "1"}) {
    EXPECT_EQ(read_file(logs + "/attempt_0/rank" + rank + "/stdout.log"), "out " + rank);
    EXPECT_EQ(read_file(logs + "/attempt_0/rank" + rank + "/stderr.log"),
              std::string("err\0", 4) + rank + "\n");
  }
  EXPECT_THAT(result.last_line(), HasSubstr(logs + "/attempt_0/rank1"));
  EXPECT_THAT(result.out, HasSubstr("[rank0]: out 0\n"));
}

TEST(LauncherOutput, FilesOfAnEarlierJobStay) {
  const TempDir dir;
  const auto run = [&](const std::string& script) {
    return run_with_input(1, script, {"--log-dir", dir.path(), "--max-restarts", "1"});
  };
  const auto log = [&](const char* attempt) {
    return read_file(dir.path() + "/attempt_" + attempt + "/rank0/stdout.log");
  };
  run("echo first; exit $((1 - LOCKSTEP_GENERATION))");
  std::filesystem::remove_all(dir.path() + "/attempt_0");
  const Result second = run("echo second; exit 6");
  EXPECT_THAT(second.last_line(), HasSubstr("/attempt_3/rank0"));
  EXPECT_EQ(log("1"), "first\n");
  EXPECT_EQ(log("2"), "second\n");
  EXPECT_EQ(log("3"), "second\n");
}

TEST(LauncherOutput, AFullDiskDoesNotEndTheJob) {
  const TempDir dir;
  // Every write to this file fails with "no space left".
  const std::string folder = dir.path() + "/attempt_0/rank0";
  std::filesystem::create_directories(folder);
  std::filesystem::create_symlink("/dev/full", folder + "/stdout.log");
  const Result result = run_with_input(1, "echo one; echo two", {"--log-dir", dir.path()});
  EXPECT_EQ(result.code, 0);
  EXPECT_THAT(result.out, AllOf(HasSubstr("one\n"), HasSubstr("two\n")));
  EXPECT_THAT(result.err, HasSubstr("No space left"));
}

TEST(LauncherOutput, AReaderThatLeavesDoesNotEndTheJob) {
  const TempDir dir;
  const Result result =
      Subprocess({"sh", "-c",
                  std::string(LOCKSTEP_COMMAND) + " run -n 2 sh -c 'seq 1 30000; echo done >> " +
                      dir.path() + "/done' | head -1; true"})
          .wait();
  EXPECT_THAT(result.out, MatchesRegex("\\[rank[01]\\]: 1\n"));
  EXPECT_TRUE(eventually([&] { return read_file(dir.path() + "/done") == "done\ndone\n"; }));
  const Result closed =
      Subprocess(
          {"sh", "-c", std::string(LOCKSTEP_COMMAND) + " run -n 2 sh -c 'echo x; exit 5' >&- 2>&-"})
          .wait();
  EXPECT_EQ(closed.code, 5);
}

TEST(LauncherOutput, AReaderThatIsStuckDoesNotStopTheEnd) {
  // Nobody reads the pipe: the ranks block, and still a signal ends everything.
  const TempDir dir;
  const std::string pipe = dir.path() + "/pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  Subprocess job({"sh", "-c",
                  "exec 3<>" + pipe + "; exec " + LOCKSTEP_COMMAND +
                      " run -n 2 sh -c 'echo ready >&2; seq 1 10000000' >&3"});
  ASSERT_TRUE(eventually([&] {
    const std::string err = job.err();
    return err.find("[rank0]: ready") != std::string::npos &&
           err.find("[rank1]: ready") != std::string::npos;
  }));
  job.kill(SIGTERM);
  EXPECT_EQ(job.wait().code, 128 + SIGTERM);
  EXPECT_TRUE(eventually([&] { return job.others().empty(); }));
}

TEST(LauncherOutput, OnlyRankZeroReadsStandardInput) {
  const Result result = run_with_input(2, "cat", {}, "line one\nline two\n");
  EXPECT_EQ(result.out, "[rank0]: line one\n[rank0]: line two\n");
}

}  // namespace
}  // namespace lockstep::test
