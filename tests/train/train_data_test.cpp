// SPDX-License-Identifier: Apache-2.0
// What users of `lockstep train` meet where the data is not what it was, or not the same
// everywhere.
#include <gmock/gmock.h>
#include <unistd.h>

#include <filesystem>

#include "tests/train/train_command.h"

namespace lockstep::test {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;

TEST_F(Train, RanksThatReadDifferentDataAreRefused) {
  for (const char* rank : {"0", "1"}) fs::create_directory(path(rank));
  write_file(path("0/data.txt"), some_text(300));
  write_file(path("1/data.txt"), some_text(400));
  Words words = command({"--data.path", "data.txt", "--train.steps", "3"});
  words.insert(words.begin(),
               {"sh", "-c", "cd \"$0/$RANK\" && exec \"$@\"", folder_.path(), LOCKSTEP_COMMAND});
  const Result result = lockstep_command(Words{"run", "-n", "2"} + words);
  EXPECT_EQ(result.code, 2) << result.err;
  const std::string first = std::to_string(some_text(300).size());
  const std::string second = std::to_string(some_text(400).size());
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("data.path has " + first + " tokens"),
                    HasSubstr("data.path has " + second + " tokens"), HasSubstr("on rank 1")));
  EXPECT_FALSE(fs::exists(path("metrics.jsonl")) && !read_steps(path("metrics.jsonl")).empty());
}

TEST_F(Train, DataThatChangesEndsTheRunAndIsRefusedAfterwards) {
  const std::string text = some_text(4000);
  write_file(data(), text);
  const Words options{"--train.steps", "100000", "--checkpoint.every", "2"};
  {
    Subprocess process(
        Words{LOCKSTEP_COMMAND, "run", "-n", "2", "--max-restarts", "2", LOCKSTEP_COMMAND} +
        command(options));
    ASSERT_TRUE(eventually([&] { return process.out().find(": saved ") != std::string::npos; }))
        << process.err();
    ASSERT_EQ(truncate(data().c_str(), static_cast<off_t>(text.size() / 10)), 0);
    const Result result = process.wait(milliseconds{60'000});
    EXPECT_EQ(result.code, 74) << result.err;
    EXPECT_THAT(result.err, AllOf(HasSubstr(data()), HasSubstr(std::to_string(text.size()))));
  }
  const Words resume{"--train.steps", "100000", "--checkpoint.resume", "auto"};
  const Result refused = run(resume);
  EXPECT_EQ(refused.code, 2);
  EXPECT_EQ(std::count(refused.err.begin(), refused.err.end(), '\n'), 1) << refused.err;
  EXPECT_THAT(refused.err, AllOf(HasSubstr(std::to_string(text.size()) + " tokens"),
                                 HasSubstr(std::to_string(text.size() / 10) + " tokens"),
                                 HasSubstr("checkpoint.other_data")));
  const std::string newest = lockstep_command({"checkpoint", "inspect", path("checkpoints")}).out;
  const size_t at = newest.rfind("step       ");
  const int64_t step = std::stoll(newest.substr(at + 11));
  const Words more{"--train.steps", std::to_string(step + 2), "--checkpoint.resume", "auto"};
  // The same data elsewhere is the same data.
  write_file(path("moved.txt"), text);
  const Result moved = run(more + Words{"--data.path", path("moved.txt")});
  EXPECT_EQ(moved.code, 0) << moved.err;
  const Words further{"--train.steps", std::to_string(step + 4), "--checkpoint.resume", "auto"};
  const Result accepted = run(further + Words{"--checkpoint.other_data", "true"});
  EXPECT_EQ(accepted.code, 0) << accepted.err;
}

}  // namespace
}  // namespace lockstep::test
