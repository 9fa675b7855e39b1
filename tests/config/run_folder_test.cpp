// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/run_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "lockstep/config/input_files.h"
#include "lockstep/config/model/hf_model.h"
#include "lockstep/core/error.h"
#include "tests/config/run_folder_fixture.h"
#include "tests/data/tokenizer/small_tokenizer.h"

namespace lockstep::config {
namespace {

namespace fs = std::filesystem;
using test::read_file;
using test::write_file;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;
using testing::ThrowsMessage;
using Words = std::vector<std::string>;

TEST_F(RunFolderTest, EachRunGetsANewFolder) {
  const std::string first = open({}), second = open({"--model.kind", "llama"}), third = open({});
  EXPECT_NE(first, third);  // most probably of the same second
  EXPECT_THAT(first, AllOf(StartsWith(path("runs/20")), HasSubstr("-gpt")));
  EXPECT_THAT(second, HasSubstr("-llama"));
  EXPECT_THAT(open({"--model.path", "hub/Qwen3-0.6B/"}), HasSubstr("-Qwen3-0.6B"));
  EXPECT_EQ(open({"--run.dir", ""}), "");
  EXPECT_EQ(std::distance(fs::directory_iterator("runs"), {}), 4);
}

TEST_F(RunFolderTest, FilesHaveTheirPlacesUnlessTheyAreNamed) {
  const TrainArguments arguments = parsed({"--metrics.trace", "auto"});
  RunFolder folder(arguments, {});
  folder.open(arguments.config.model);
  const std::string dir = folder.config().run.dir;
  EXPECT_EQ(folder.config().checkpoint.dir, dir + "/checkpoints");
  EXPECT_EQ(folder.config().metrics.file, dir + "/metrics.jsonl");
  EXPECT_EQ(folder.config().metrics.trace, dir + "/traces");
  const TrainArguments named =
      parsed({"--checkpoint.dir", "there", "--metrics.file", "", "--run.dir", ""});
  EXPECT_EQ(RunFolder(named, {}).config().checkpoint.dir, "there");
  EXPECT_EQ(RunFolder(named, {}).config().metrics.file, "");
  EXPECT_EQ(RunFolder(parsed({"--run.dir", ""}), {}).config().checkpoint.dir, "");
}

TEST_F(RunFolderTest, ConfigurationHasAbsolutePathsButNotItsOwn) {
  const std::string dir = open({"-n", "3", "--run.dir", "mine", "--checkpoint.other_data", "true",
                                "--offload.disk", "disk", "--data.validation", "more.txt"});
  EXPECT_EQ(dir, path("mine"));
  EXPECT_THAT(read_file("mine/config.toml"), Not(HasSubstr("mine")));
  const TrainConfig config = read_run_config("mine");
  EXPECT_EQ(config.data.path, path("text.txt"));
  EXPECT_EQ(config.data.validation, path("more.txt"));
  EXPECT_EQ(config.offload.disk, path("disk"));
  EXPECT_EQ(config.data.tokenizer, "bytes");
  EXPECT_EQ(config.model.vocab, 256);
  EXPECT_EQ(config.run.ranks, 3);
  EXPECT_EQ(config.checkpoint.dir, "auto");
  EXPECT_FALSE(config.checkpoint.other_data);  // accepted once
}

TEST_F(RunFolderTest, AnotherRunsFolderIsRefused) {
  open({"--run.dir", "mine"});
  pretend_checkpoint("mine");
  expect_refused({"--run.dir", "mine"}, {path("mine"), "--resume mine"});
  EXPECT_EQ(open({"--run.dir", "mine", "--resume", "auto"}), path("mine"));
  fs::create_directory("other");
  write_file("other/notes.txt", "");  // of the user
  EXPECT_EQ(open({"--run.dir", "other"}), path("other"));
  fs::create_directory("third");
  write_file("third/metrics.jsonl", "{\"step\":1,\"loss\":2.5}\n");
  expect_refused({"--run.dir", "third"}, {path("third")});
}

TEST_F(RunFolderTest, AStartThatFailedBeforeItsFirstStepDoesNotBlockTheNext) {
  open({"--run.dir", "mine", "--steps", "30"});
  write_file("mine/metrics.jsonl", "{\"step\":0,\"validation_loss\":2.5}\n");
  EXPECT_EQ(open({"--run.dir", "mine", "--steps", "40"}), path("mine"));
  EXPECT_EQ(read_next_run_config("mine").train.steps, 40);
  open({"--run.dir", "named", "--metrics.file", "there.jsonl"});
  write_file("there.jsonl", "{\"step\":1,\"loss\":2.5}\n");
  expect_refused({"--run.dir", "named"}, {path("named")});
}

TEST_F(RunFolderTest, OneOfTwoThatBeginInOneFolderFails) {
  const TrainArguments arguments = parsed({"--run.dir", "mine"});
  RunFolder first(arguments, {}), second(arguments, {});
  first.open(arguments.config.model);
  EXPECT_THAT([&] { second.open(arguments.config.model); },
              ThrowsMessage<ConfigError>(HasSubstr(path("mine/config.toml"))));
}

TEST_F(RunFolderTest, AFolderThatCannotBeMadeIsRefused) {
  write_file("file", "");
  expect_refused({"--run.dir", "file/below"}, {"run.dir", path("file"), "--run.dir"});
  write_file("runs", "");
  expect_refused({}, {"runs", "--run.dir"});
}

TEST_F(RunFolderTest, AutoNeedsAFolderToLookIn) {
  expect_refused({"--resume", "auto"}, {"checkpoint.resume", "run.dir"});
  const std::string run = open({});
  expect_refused({"--resume", "auto"}, {"--resume runs/" + fs::path(run).filename().string()});
  EXPECT_NO_THROW(open({"--resume", "auto", "--checkpoint.dir", "old"}));
}

TEST_F(RunFolderTest, ARunIsContinuedWithItsConfiguration) {
  write_file("run.toml", "[train]\nsteps = 30\nseq_len = 64\n[optim]\nlr = 0.5\n");
  const std::string run = open({"-n", "2", "--config", "run.toml", "--checkpoint.every", "7"});
  fs::rename(run, "moved");
  const auto again = parse_train_arguments({"--resume", "moved", "--train.seq_len", "32"});
  EXPECT_EQ(again.continued, "moved");
  EXPECT_EQ(again.ranks, 2);
  EXPECT_EQ(again.config.train.steps, 30);
  EXPECT_EQ(again.config.train.seq_len, 32);
  EXPECT_EQ(again.config.checkpoint.every, 7);
  EXPECT_EQ(again.config.data.path, path("text.txt"));
  // A file that is given is over that of the run.
  write_file("more.toml", "[train]\nsteps = 40\n");
  const auto more = parse_train_arguments({"--resume", "moved", "--config", "more.toml"});
  EXPECT_EQ(more.config.train.steps, 40);
  EXPECT_EQ(more.config.optim.lr, 0.5);
  // Its weights alone: a run of its own.
  const auto weights = parse_train_arguments({"--resume", "moved", "--checkpoint.load", "model"});
  EXPECT_EQ(weights.continued, "");
  EXPECT_EQ(weights.config.train.steps, TrainConfig{}.train.steps);

  pretend_checkpoint("moved");
  const RunFolder folder(again, {});
  EXPECT_EQ(folder.config().run.dir, path("moved"));
  EXPECT_EQ(folder.config().checkpoint.resume, "auto");
  EXPECT_EQ(folder.config().checkpoint.dir, path("moved/checkpoints"));
  // In another folder its own files stay as they are.
  const RunFolder branch(
      parse_train_arguments({"--resume", "moved", "--run.dir", "branch", "--steps", "50"}), {});
  EXPECT_EQ(branch.config().checkpoint.resume, path("moved/checkpoints"));
  EXPECT_EQ(branch.config().checkpoint.dir, "auto");
  EXPECT_EQ(branch.config().run.dir, path("branch"));
  // Also where it had named a place of its own.
  open({"--run.dir", "named", "--checkpoint.dir", "there"});
  const Words resume{"--resume", "named"};
  EXPECT_EQ(RunFolder(parse_train_arguments(resume), {}).config().checkpoint.dir, path("there"));
  const RunFolder other(parse_train_arguments({"--resume", "named", "--run.dir", "branch"}), {});
  EXPECT_EQ(other.config().checkpoint.dir, "auto");
}

TEST_F(RunFolderTest, WithoutACheckpointARunBeginsAsItDid) {
  test::save_model("base", test::small_config(ModelKind::gpt), {}, {.step = 1});
  open({"--run.dir", "mine", "--resume", "base/step-00000001", "--checkpoint.load", "model"});
  const auto again = parse_train_arguments({"--resume", "mine", "--steps", "20"});
  RunFolder folder(again, {});
  EXPECT_EQ(folder.config().checkpoint.resume, path("base/step-00000001"));
  EXPECT_EQ(folder.config().checkpoint.load, LoadWhat::model);
  folder.open(again.config.model);
  // A start that fails after this leaves the configuration as it was.
  EXPECT_EQ(read_run_config("mine").train.steps, TrainConfig{}.train.steps);
  EXPECT_EQ(read_next_run_config("mine").train.steps, 20);
  commit_run_config("mine");
  EXPECT_EQ(read_run_config("mine").train.steps, 20);
  EXPECT_EQ(read_run_config("mine").checkpoint.resume, path("base/step-00000001"));
  pretend_checkpoint("mine");
  EXPECT_EQ(RunFolder(again, {}).config().checkpoint.load, LoadWhat::all);
  EXPECT_EQ(RunFolder(again, {}).config().checkpoint.resume, "auto");
}

TEST_F(RunFolderTest, ACheckpointInARunHasTheConfigurationOfTheRun) {
  make_run("mine");
  for (const std::string name :
       {"mine/checkpoints/step-00000003", "mine/checkpoints/best/", "mine/best"}) {
    SCOPED_TRACE(name);
    const auto arguments = parse_train_arguments({"--resume", name, "--optim.lr", "0.5"});
    EXPECT_EQ(arguments.continued, "mine");
    EXPECT_EQ(arguments.config.train.steps, 30);
    RunFolder folder(arguments, {});
    EXPECT_EQ(folder.config().run.dir, "auto");
    EXPECT_EQ(folder.config().checkpoint.dir, "auto");
    EXPECT_EQ(formats::read_manifest(folder.config().checkpoint.resume).step, 3);
    // Without a checkpoint of its own the new run begins where it began.
    folder.open(folder.config().model);
    const TrainConfig stored = read_run_config(folder.config().run.dir);
    EXPECT_EQ(stored.checkpoint.resume, folder.config().checkpoint.resume);
  }
  for (const std::string name : {"mine", "mine/checkpoints", "mine/checkpoints/"}) {
    const RunFolder folder(parse_train_arguments({"--resume", name}), {});
    EXPECT_EQ(folder.config().run.dir, path("mine"));
    EXPECT_EQ(folder.config().checkpoint.resume, "auto");
    EXPECT_EQ(checkpoint_at(name), name.starts_with("mine/checkpoints")
                                       ? fs::path("mine/checkpoints") / "step-00000005"
                                       : fs::path("mine/checkpoints/step-00000005"));
  }
  EXPECT_EQ(checkpoint_at("mine/best"), "mine/checkpoints/best");
  EXPECT_THAT(describe_choice("mine", checkpoint_at("mine")),
              AllOf(HasSubstr("step 5"), HasSubstr("mine/checkpoints/best"), HasSubstr("step 3")));
  EXPECT_EQ(describe_choice("mine/best", checkpoint_at("mine/best")), "");
  for (const std::string name : {"nosuch", "mine/checkpoints/step-00000004", "nosuch/best"})
    expect_refused({"--resume", name}, {"no folder", name});
}

TEST_F(RunFolderTest, WeightsBringTheirModelAndTokenizer) {
  test::write_small_tokenizer("tokenizer.json", 256);
  make_run("mine", {"--model.kind", "llama", "--model.window", "4", "--data.tokenizer",
                    "tokenizer.json", "--model.dropout", "0.1"});
  fs::remove("tokenizer.json");
  const ModelSpec saved = read_run_config("mine").model;
  for (const std::string name : {"mine", "mine/best"}) {
    const Words words{"--resume", name, "--checkpoint.load", "model", "--steps", "7"};
    RunFolder folder(parsed(words), {});
    ModelSpec expected = saved;
    expected.dropout = 0;  // of the training
    EXPECT_EQ(folder.config().model, expected);
    EXPECT_EQ(folder.config().data.tokenizer, path("mine/tokenizer.json"));
    EXPECT_EQ(folder.config().train.seq_len, 16);
    EXPECT_EQ(folder.config().train.steps, 7);
    folder.open(folder.config().model);
    const TrainConfig stored = read_run_config(folder.config().run.dir);
    EXPECT_EQ(stored.data.tokenizer, path("mine/tokenizer.json"));
    EXPECT_EQ(stored.train.seq_len, 16);
  }
  // Also of a checkpoint outside of a run folder, and also to continue it.
  fs::rename("mine/checkpoints", "moved");
  for (const std::string load : {"all", "model"})
    EXPECT_EQ(begun({"--resume", "moved", "--checkpoint.load", load}).model.window, 4);
  // What is given counts, unless it is another model.
  const Words base{"--resume", "moved", "--checkpoint.load", "model", "--data.tokenizer", "bytes"};
  const auto with = [&](const Words& more) {
    Words words = base;
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  EXPECT_EQ(begun(with({"--model.layers", "1", "--model.dropout", "0.2"})).model.dropout, 0.2);
  EXPECT_EQ(begun(base).data.tokenizer, "bytes");
  EXPECT_EQ(begun(with({"--model.positions", "64", "--seq-len", "64"})).train.seq_len, 64);
  expect_refused(with({"--model.heads", "4", "--model.window", "0"}),
                 {"moved/step-00000005", "model.heads is 2", "4", "model.window is 4"});
  EXPECT_EQ(begun(with({"--model.heads", "4", "--checkpoint.partial", "true"})).model.heads, 4);
}

TEST_F(RunFolderTest, AContinuedRunKeepsItsModel) {
  make_run("mine");
  expect_refused({"--resume", "mine", "--model.heads", "4"}, {"model.heads is 2", "4"});
  expect_refused({"--resume", "mine", "--model.rope_theta", "500000"},
                 {"model.rope_theta is 10000", "5e+05"});
  expect_refused({"--resume", "mine/best", "--model.layers", "2"}, {"model.layers is 1", "2"});
  EXPECT_EQ(begun({"--resume", "mine", "--model.dropout", "0.5"}).model.dropout, 0.5);
  expect_refused({"--resume", "mine", "--model.path", "hub"}, {"model.path", "hub", "mine"});
  expect_refused({"--resume", "mine", "--checkpoint.load", "model", "--model.path", "hub"},
                 {"model.path", "hub", "mine"});
}

TEST_F(RunFolderTest, AFolderOfWeightsDecidesTheModel) {
  fs::create_directory("hub");
  write_file("hub/config.json", hf_config_json(test::small_config(ModelKind::llama).model));
  const Words path_alone{"--model.path", "hub"};
  EXPECT_EQ(begun(path_alone).train.seq_len, 16);  // the model has no more positions
  EXPECT_EQ(begun({"--model.path", "hub", "--model.layers", "2", "--seq-len", "8"}).train.seq_len,
            8);
  expect_refused({"--model.path", "hub", "--model.layers", "3", "--model.ffn", "0"},
                 {"hub/config.json", "model.layers is 2", "3"});
  const TrainConfig longer = begun({"--model.path", "hub", "--seq-len", "32"});
  EXPECT_THAT([&] { resolve_model(longer, 20); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("32"), HasSubstr("--seq-len"))));
}

TEST_F(RunFolderTest, ALayoutOfTheRunForOtherRanksIsNamed) {
  open({"--run.dir", "mine", "-n", "2", "--parallel.tp", "2"});
  const auto check = [](const Words& words, int world) {
    require_layout_of_run(parse_train_arguments(words), world);
  };
  EXPECT_THAT(
      [&] {
        check({"--resume", "mine", "-n", "1"}, 1);
      },
      ThrowsMessage<ConfigError>(AllOf(HasSubstr("mine/config.toml"), HasSubstr("1 rank "),
                                       HasSubstr("--parallel.tp 1"))));
  EXPECT_NO_THROW(check({"--resume", "mine", "-n", "1", "--parallel.tp", "1"}, 1));
  EXPECT_NO_THROW(check({"--resume", "mine"}, 2));
}

TEST_F(RunFolderTest, ARestartFindsItsOwnFolder) {
  const auto env = [](const char* job, int restarts) {
    setenv("TORCHELASTIC_RUN_ID", job, 1);
    return RankEnv{.world_size = 2, .launcher = Launcher::lockstep, .restart_count = restarts};
  };
  const std::string first = open({}, env("a", 0)), second = open({}, env("b", 0));
  EXPECT_NE(first, second);
  EXPECT_EQ(open({}, env("a", 1)), first);
  EXPECT_EQ(open({}, env("b", 1)), second);
  EXPECT_NE(open({}, env("c", 1)), second);
  EXPECT_EQ(RunFolder(parsed({}), env("a", 2)).config().checkpoint.resume, "none");
  pretend_checkpoint(first);
  EXPECT_EQ(RunFolder(parsed({}), env("a", 2)).config().checkpoint.resume, "auto");
  // torchrun may have the same name for all jobs: its process counts.
  RankEnv torchrun = env("none", 0);
  torchrun.launcher = Launcher::torchrun;
  const std::string third = open({}, torchrun);
  torchrun.restart_count = 1;
  EXPECT_EQ(open({}, torchrun), third);
  // A named one that another job has is refused all the same.
  const Words named{"--run.dir", "mine"};
  open(named, env("a", 0));
  pretend_checkpoint("mine");
  EXPECT_EQ(open(named, env("a", 1)), path("mine"));
  EXPECT_THROW(open(named, env("b", 1)), ConfigError);
}
}  // namespace
}  // namespace lockstep::config
