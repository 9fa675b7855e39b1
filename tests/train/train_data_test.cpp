// SPDX-License-Identifier: Apache-2.0
// What users of `lockstep train` meet where the data is not what it was, or not the same
// everywhere.
#include <gmock/gmock.h>
#include <unistd.h>

#include <filesystem>
#include <regex>

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

// Examples that fill rows of 32 inputs: 4 rows of 24 + 8, and 2 of 16 + 16.
std::string examples_that_fit(const std::string& kind) {
  std::string lines;
  for (int i = 0; i < 12; ++i) {
    std::string text = some_text(2 + i).substr(static_cast<size_t>(20 * i), 8 + 8 * (i % 3) + 1);
    std::replace(text.begin(), text.end(), '\n', ' ');
    lines +=
        kind == "text"
            ? json{{"text", text}}.dump() + "\n"
            : json{{"prompt", text.substr(0, 3)}, {"completion", text.substr(3)}}.dump() + "\n";
  }
  return lines;
}

const Words kPacked{"--data.pack",          "true", "--data.validation",   "0",
                    "--train.steps",        "4",    "--model.dropout",     "0",
                    "--train.global_batch", "6",    "--train.micro_batch", "1"};

// A step that has all examples trains on the same whether they are packed or not.
TEST_F(Train, PackedRowsTrainAsTheirExamplesDo) {
  write_file(path("tune.jsonl"), examples_that_fit("prompt"));
  for (const std::string kind : {"gpt", "llama"}) {
    const Words options = kPacked + Words{"--data.path", path("tune.jsonl"), "--model.kind", kind};
    const auto packed = steps("packed-" + kind, options);
    expect_follows("single-" + kind,
                   options + Words{"--data.pack", "false", "--train.global_batch", "12"}, packed);
  }
  const Result said = run(kPacked + Words{"--data.path", path("tune.jsonl")});
  EXPECT_THAT(said.out, AllOf(HasSubstr("6 rows"), HasSubstr("100.0 %"))) << said.err;
}

TEST_F(Train, PackedRowsFollowOneProcessInEveryLayout) {
  write_file(path("texts.jsonl"), examples_that_fit("text"));
  const auto compare = [&](const std::string& kind, const std::vector<Words>& layouts) {
    const Words options = kPacked + Words{"--data.path",        path("texts.jsonl"),
                                          "--model.kind",       kind,
                                          "--train.eval_every", "2",
                                          "--data.validation",  path("texts.jsonl")};
    const auto one = steps("one-" + kind, options);
    for (size_t i = 0; i < layouts.size(); ++i)
      expect_follows(kind + std::to_string(i), options + layouts[i], one);
  };
  const Words tp{"--parallel.tp", "2"}, pp{"--parallel.pp", "2"}, two{"-n", "2"}, four{"-n", "4"};
  const Words sp{"--parallel.sequence_parallel", "true"},
      no_sp{"--parallel.sequence_parallel", "false"};
  compare("gpt", {two, two + tp + sp, four + tp + pp + Words{"--train.recompute", "full"}});
  compare("llama",
          {two + Words{"--parallel.shard", "full"}, two + tp + no_sp,
           two + pp + Words{"--parallel.schedule", "zb-h1", "--train.recompute", "selective"}});
}

TEST_F(Train, PackedRowsResumeWhereTheyWere) {
  write_file(path("texts.jsonl"), examples_that_fit("text"));
  const Words options = kPacked + Words{"--data.path", path("texts.jsonl"), "--train.global_batch",
                                        "2",           "--optim.schedule",  "constant"};
  // Other texts of the same lengths are other data, also without packing.
  steps("before", options + Words{"--checkpoint.dir", path("before")});
  const std::string texts = examples_that_fit("text");
  write_file(path("other.jsonl"), std::regex_replace(texts, std::regex("n"), "m"));
  for (const std::string pack : {"true", "false"}) {
    const Result refused =
        run(options + Words{"--data.path", path("other.jsonl"), "--data.pack", pack, "--resume",
                            path("before"), "--train.steps", "6"});
    EXPECT_EQ(refused.code, 2);
    EXPECT_THAT(refused.err, says("before ... checkpoint.other_data"));
  }
  const auto one = losses(steps("one", options + Words{"--train.steps", "6"}));
  expect_close(moving(options, {{"-n", "1"}, {"-n", "2"}, {"-n", "2", "--parallel.pp", "2"}}), one,
               1e-5);
}

TEST_F(Train, DataWithoutDocumentEndsIsNotPacked) {
  write_file(path("ids.bin"), std::string(4000, '\1'));
  expect_refused({"--data.path", path("ids.bin"), "--data.pack", "true", "--model.vocab", "300"},
                 "ids.bin ... no .idx ... data.tokenizer");
  // One document that is longer than a row is cut, and counted.
  const Result cut = run({"--data.pack", "true", "--data.validation", "0", "--train.steps", "3"});
  EXPECT_EQ(cut.code, 0) << cut.err;
  EXPECT_THAT(cut.err, says("1 document ... 1 are longer ... 32"));
}

}  // namespace
}  // namespace lockstep::test
