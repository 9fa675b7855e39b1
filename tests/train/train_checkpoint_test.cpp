// SPDX-License-Identifier: Apache-2.0
// What users of `lockstep train` meet of checkpoints beyond saving and going on.
#include <gmock/gmock.h>

#include <filesystem>
#include <random>
#include <thread>

#include "tests/train/train_command.h"

namespace lockstep::test {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

// By path in the folder. The manifest holds the configuration, which names other folders.
std::map<std::string, std::string> tensors_in(const std::string& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.path().extension() == ".safetensors")
      files[fs::relative(entry.path(), folder)] = read_file(entry.path());
  }
  return files;
}

int count(const std::string& text, const std::string& what) {
  int found = 0;
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++found;
  return found;
}

TEST_F(Train, SavesBesideTheTrainingWhatItWouldSaveBetweenSteps) {
  const Words options{"-n",
                      "2",
                      "--parallel.shard",
                      "full",
                      "--train.steps",
                      "6",
                      "--checkpoint.every",
                      "2",
                      "--checkpoint.keep",
                      "0",
                      "--train.threads",
                      "1"};
  steps("between", options);
  const Result result =
      run(options + Words{"--checkpoint.dir", path("beside"), "--checkpoint.async", "true"});
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(count(result.out, "training waited"), 3) << result.out;
  const auto files = tensors_in(path("beside"));
  EXPECT_EQ(files.size(), 6U);
  EXPECT_EQ(files, tensors_in(path("between")));
}

TEST_F(Train, SkipsCheckpointsWhileOneIsWritten) {
  const Result result = run({"-n", "2", "--train.steps", "10", "--checkpoint.every", "1",
                             "--checkpoint.async", "true", "--checkpoint.when_busy", "skip"});
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(count(result.out, ": saved ") + count(result.out, "is still being written"), 10)
      << result.out;
  EXPECT_TRUE(fs::exists(path("checkpoints/step-00000010/manifest.json")));
}

TEST_F(Train, BeginsWithTheWeightsOfACheckpoint) {
  const auto first = steps("first", {"--train.steps", "10"});
  const auto second = steps("second", {"--train.steps", "3", "--checkpoint.resume", path("first"),
                                       "--checkpoint.load", "model"});
  ASSERT_EQ(second.size(), 3U);
  EXPECT_EQ(second[0]["step"], 1);
  EXPECT_LT(second[0]["loss"], 0.9 * first[0]["loss"].get<double>());
  expect_refused({"--checkpoint.resume", "auto", "--checkpoint.load", "model"},
                 "checkpoint.load is model, but checkpoint.resume is auto");
}

TEST_F(Train, LoadsWhatFitsOfAnotherModel) {
  steps("first", {"--train.steps", "3"});
  const Words more{"--train.steps",       "4",          "--model.layers", "3",
                   "--checkpoint.resume", path("first")};
  expect_refused(more, "model.layers is 2 ... 3");
  const Result result = run(more + Words{"--checkpoint.partial", "true"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.err, AllOf(HasSubstr("loaded in part"), HasSubstr("it lacks: blocks.2."),
                                Not(HasSubstr("blocks.1."))));
  EXPECT_TRUE(fs::exists(path("checkpoints/step-00000004/manifest.json")));
}

// Files may not grow beyond so many blocks of 512 bytes: what a full disk looks like to one
// process.
TEST_F(Train, ContinuesWithoutDiskSpaceAndKeepsTheOldCheckpoint) {
  steps("checkpoints", {"--train.steps", "3"});
  const auto before = tensors_in(path("checkpoints"));
  std::string script = "ulimit -f 200; exec \"$@\"";
  Words words{"sh", "-c", script, "sh", LOCKSTEP_COMMAND};
  Subprocess process(words + command({"--train.steps", "6", "--checkpoint.every", "2",
                                      "--checkpoint.resume", "auto"}));
  const Result result = process.wait(milliseconds{60'000});
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.err, AllOf(HasSubstr("step 4 was not saved"), HasSubstr("File too large")));
  EXPECT_THAT(result.last_line(), HasSubstr("File too large"));
  EXPECT_EQ(read_steps(path("metrics.jsonl")).size(), 3U);  // all the same
  EXPECT_EQ(tensors_in(path("checkpoints")), before);
  for (const auto& entry : fs::directory_iterator(path("checkpoints")))
    EXPECT_EQ(entry.path().filename(), "step-00000003");
}

TEST_F(Train, ASecondJobIsRefusedTheFolder) {
  const Words options{"-n", "2", "--train.steps", "100000", "--checkpoint.every", "1"};
  Subprocess first(Words{LOCKSTEP_COMMAND} + command(options));
  ASSERT_TRUE(eventually([&] { return count(first.out(), ": saved ") > 0; })) << first.err();
  const Words second =
      options + Words{"--checkpoint.resume", "auto", "--metrics.file", path("second.jsonl")};
  expect_refused(second, "checkpoint folder " + path("checkpoints") + " ... pid");
  first.kill(SIGTERM);
  EXPECT_EQ(first.wait(milliseconds{60'000}).code, 75);
  EXPECT_FALSE(fs::exists(path("checkpoints/.lock")));
  EXPECT_EQ(lockstep_command({"checkpoint", "verify", "--all", path("checkpoints")}).code, 0);
}

std::string flip_a_byte(const std::string& checkpoint) {
  for (const auto& entry : fs::directory_iterator(checkpoint)) {
    if (entry.path().extension() != ".safetensors") continue;
    std::string bytes = read_file(entry.path());
    bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 1);
    write_file(entry.path(), bytes);
    return entry.path();
  }
  return "no file";
}

TEST_F(Train, ResumesFromTheNewestSoundCheckpoint) {
  const Words options{"-n", "2", "--train.steps", "6", "--checkpoint.every", "2"};
  const auto first = steps("checkpoints", options);
  const std::string last = path("checkpoints/step-00000006"),
                    older = path("checkpoints/step-00000004");
  const std::string file = flip_a_byte(last);
  // One that is named is refused, with those that could be; a launcher does not try it again.
  const Result named =
      lockstep_command(Words{"run", "-n", "2", "--max-restarts", "3", LOCKSTEP_COMMAND} +
                       command({"--train.steps", "6", "--checkpoint.resume", last}));
  EXPECT_EQ(named.code, 2) << named.err;
  EXPECT_THAT(named.err, AllOf(HasSubstr(file), HasSubstr("sound ones: " + older)));
  const Result resumed = run(options + Words{"--checkpoint.resume", "auto"});
  EXPECT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_EQ(count(resumed.err, last + " is skipped: " + file), 1) << resumed.err;
  EXPECT_THAT(resumed.out, HasSubstr("resume " + older + " at step 4"));
  expect_close(losses(read_steps(path("metrics.jsonl"))), {first[4]["loss"], first[5]["loss"]},
               1e-6);
  EXPECT_EQ(lockstep_command({"checkpoint", "verify", "--all", path("checkpoints")}).code, 0);
  for (const auto& entry : fs::directory_iterator(path("checkpoints"))) flip_a_byte(entry.path());
  const Result none = run(options + Words{"--train.steps", "8", "--checkpoint.resume", "auto"});
  EXPECT_EQ(none.code, 2);
  EXPECT_THAT(none.err, HasSubstr("none of the 3 checkpoints"));
}

TEST_F(Train, ResumesAfterKills) {
  std::mt19937 random(std::random_device{}());
  const Words options{"-n",
                      "2",
                      "--train.steps",
                      "100000",
                      "--checkpoint.every",
                      "1",
                      "--checkpoint.async",
                      "true",
                      "--checkpoint.resume",
                      "auto"};
  std::string newest;
  for (int i = 0; i < 4; ++i) {
    Subprocess process(Words{LOCKSTEP_COMMAND} + command(options));
    // It has resumed where it could, and saved something.
    ASSERT_TRUE(eventually([&] { return count(process.out(), ": saved ") > 0; })) << process.err();
    if (!newest.empty()) {
      EXPECT_THAT(process.out(), HasSubstr("resume " + path("checkpoints")));
    }
    std::this_thread::sleep_for(
        std::chrono::microseconds(std::uniform_int_distribution<int>(0, 200'000)(random)));
    for (const pid_t pid : process.others()) ::kill(pid, SIGKILL);
    process.kill(SIGKILL);
    process.wait();
    newest = "some";
    EXPECT_EQ(lockstep_command({"checkpoint", "verify", "--all", path("checkpoints")}).code, 0);
  }
}

TEST_F(Train, MomentsInBfloat16ResumeInOtherLayoutsAndTypes) {
  const Words model{"--model.kind",     "llama",    "--train.reproducible", "true",
                    "--optim.schedule", "constant", "--train.steps",        "6"};
  const Words small = model + Words{"--optim.moments", "bfloat16"}, one{"-n", "1"},
              shard{"-n", "2", "--parallel.shard", "full"}, pair{"-n", "2", "--parallel.tp", "2"};
  const auto expected = losses(steps("small", small));
  // From the second step on, which reads what the first has rounded.
  const auto wide = losses(steps("wide", model));
  EXPECT_EQ(expected[0], wide[0]);
  EXPECT_NE(expected, wide);
  expect_close(expected, wide, 1e-3);
  EXPECT_EQ(moving(small, {shard, one, shard}), expected);
  expect_close(losses(steps("tp", small + pair)), expected, 1e-5);
  EXPECT_NE(losses(steps("seed", small + Words{"--train.seed", "2"})), expected);

  // float32 to bfloat16, and back.
  const Words narrow = shard + Words{"--optim.moments", "bfloat16"};
  fs::remove_all(path("moving"));
  expect_close(moving(model, {one, narrow, one}), wide, 1e-3);
  const auto type_at = [&](int step) {
    const std::string manifest = path("moving") + "/step-0000000" + std::to_string(step);
    const json tensors = json::parse(read_file(manifest + "/manifest.json"))["tensors"];
    return tensors["optim.norm.weight.exp_avg_sq"]["dtype"].get<std::string>();
  };
  EXPECT_EQ(type_at(2), "F32");
  EXPECT_EQ(type_at(4), "BF16");
  EXPECT_EQ(type_at(6), "F32");
  for (const Words& options :
       {Words{"--optim.name", "sgd"}, Words{"--offload.optimizer", "true"}}) {
    expect_refused(small + options, "optim.moments is bfloat16, must be float32");
  }
}

}  // namespace
}  // namespace lockstep::test
