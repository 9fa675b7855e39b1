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
#include "lockstep/config/run_tokenizer.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "tests/data/tokenizer/small_tokenizer.h"
#include "tests/support/subprocess.h"

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

// In a folder of its own, where runs/ appears.
class RunFolderTest : public testing::Test {
 protected:
  RunFolderTest() { fs::current_path(folder_.path()); }
  ~RunFolderTest() override {
    log::copy_to("");
    unsetenv("TORCHELASTIC_RUN_ID");
    fs::current_path(before_);
  }

  static TrainArguments parsed(const Words& words) {
    Words all{"--data.path", "text.txt"};
    all.insert(all.end(), words.begin(), words.end());
    return parse_train_arguments(all);
  }
  // The path of the folder that a run with these arguments gets.
  static std::string open(const Words& words, const RankEnv& env = {}) {
    const TrainArguments arguments = parsed(words);
    RunFolder folder(arguments, env);
    TrainConfig config = arguments.config;
    adopt(config, folder.open(config.model.resolved(config.train.seq_len, 256)));
    EXPECT_EQ(config, folder.config());
    return config.run.dir;
  }
  static void expect_refused(const Words& words, const std::vector<std::string>& facts) {
    try {
      open(words);
      FAIL() << testing::PrintToString(words);
    } catch (const ConfigError& failure) {
      for (const std::string& fact : facts) EXPECT_THAT(failure.what(), HasSubstr(fact));
    }
  }
  static void pretend_checkpoint(const std::string& run) {
    fs::create_directories(run + "/checkpoints/step-00000005");
    write_file(run + "/checkpoints/step-00000005/manifest.json", "{}");
  }
  std::string path(const std::string& name) const { return folder_.path() + "/" + name; }

 private:
  const std::string before_ = fs::current_path();
  const test::TempDir folder_;
};

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
  expect_refused({"--run.dir", "mine"}, {path("mine"), "--resume mine"});
  EXPECT_EQ(open({"--run.dir", "mine", "--resume", "auto"}), path("mine"));
  fs::create_directory("other");
  write_file("other/notes.txt", "");  // of the user
  EXPECT_EQ(open({"--run.dir", "other"}), path("other"));
  fs::create_directory("third");
  write_file("third/metrics.jsonl", "");
  expect_refused({"--run.dir", "third"}, {path("third")});
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
  EXPECT_EQ(open(named, env("a", 1)), path("mine"));
  EXPECT_THROW(open(named, env("b", 1)), ConfigError);
}

TEST_F(RunFolderTest, CheckpointsFindTheTokenizerThatTheyWereTrainedWith) {
  test::write_small_tokenizer("tokenizer.json", 256);
  write_file("tokenizer_config.json", "{}");
  const std::string run = open({"--run.dir", "mine", "--data.tokenizer", "tokenizer.json"});
  EXPECT_EQ(read_file("mine/tokenizer.json"), read_file("tokenizer.json"));
  EXPECT_EQ(read_file("mine/tokenizer_config.json"), "{}");
  const auto manifest_of = [](const std::string& tokenizer) {
    TrainConfig config;
    config.data.tokenizer = tokenizer;
    return formats::Manifest{
        .state = {{"tokenizer", "{\"crc32c\":\"" + tokenizer_crc(tokenizer) + "\"}"}},
        .config = to_json(config)};
  };
  const auto first = manifest_of(path("tokenizer.json"));
  // The run continues with another one, and both stay.
  test::write_small_tokenizer("second.json", 300);
  open({"--run.dir", "mine", "--data.tokenizer", "second.json", "--resume", "auto"});
  const auto second = manifest_of(path("second.json"));
  fs::rename("mine", "moved");
  fs::remove("tokenizer.json");
  fs::remove("second.json");
  const std::string checkpoint = "moved/checkpoints/step-00000005";
  EXPECT_EQ(saved_tokenizer(first, checkpoint).name, path("moved/tokenizer.json"));
  EXPECT_EQ(saved_tokenizer(first, checkpoint + "/").name, path("moved/tokenizer.json"));
  const std::string found = saved_tokenizer(second, checkpoint).name;
  EXPECT_EQ(tokenizer_crc(second, checkpoint), tokenizer_crc(found));
  EXPECT_THAT(found, StartsWith(path("moved/tokenizer-")));
  // Elsewhere the path that was used is all there is.
  EXPECT_EQ(saved_tokenizer(first, "elsewhere/step-00000005").name, path("tokenizer.json"));
  TrainConfig bytes;
  bytes.data.tokenizer = "bytes";
  EXPECT_EQ(saved_tokenizer({.config = to_json(bytes)}, checkpoint).name, "bytes");
}

// A Hugging Face folder, as far as it is read before the weights are.
class ModelFolder : public RunFolderTest {
 protected:
  ModelFolder() {
    write_file("text.txt", std::string(2000, 'a'));
    fs::create_directory("model");
    write_file(
        "model/config.json",
        R"({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 32,)"
        R"( "vocab_size": 300, "eos_token_id": [257, 256], "bos_token_id": 5})");
    write_file("model/generation_config.json", R"({"eos_token_id": [257, 256], "top_k": 7})");
  }
  static void give_tokenizer(const std::string& file) { test::write_small_tokenizer(file, 299); }
  static TrainConfig config_of(const Words& words) {
    Words all{"--model.path", "model", "--train.seq_len", "16", "--run.dir", ""};
    all.insert(all.end(), words.begin(), words.end());
    return parsed(all).config;
  }
  // What check_inputs writes to the log.
  static std::string warnings(const Words& words) {
    testing::internal::CaptureStderr();
    check_inputs(config_of(words), 1);
    return testing::internal::GetCapturedStderr();
  }
};

TEST_F(ModelFolder, TextNeedsATokenizer) {
  EXPECT_THAT([&] { check_inputs(config_of({}), 1); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("model.path: model"),
                                               HasSubstr("--data.tokenizer"), HasSubstr("bytes"),
                                               Not(HasSubstr("\n")))));
  EXPECT_EQ(warnings({"--data.tokenizer", "bytes"}), "");
  give_tokenizer("other.json");
  EXPECT_EQ(warnings({"--data.tokenizer", "other.json"}), "");
  // Token files have been encoded; validation data may be text.
  write_file("ids.bin", std::string(2000, '\1'));
  EXPECT_EQ(warnings({"--data.path", "ids.bin"}), "");
  EXPECT_THROW(
      check_inputs(config_of({"--data.path", "ids.bin", "--data.validation", "text.txt"}), 1),
      ConfigError);
  give_tokenizer("model/tokenizer.json");
  EXPECT_EQ(warnings({}), "");
}

TEST_F(ModelFolder, AnotherTokenizerThanTheModelsIsAWarning) {
  give_tokenizer("model/tokenizer.json");
  give_tokenizer("same.json");
  EXPECT_EQ(warnings({"--data.tokenizer", "same.json"}), "");
  write_file("other.json", read_file("same.json") + "\n");
  const std::string warning = warnings({"--data.tokenizer", "other.json"});
  EXPECT_THAT(warning,
              AllOf(HasSubstr("model/tokenizer.json"), HasSubstr(path("other.json")),
                    HasSubstr(tokenizer_crc("same.json")), HasSubstr(tokenizer_crc("other.json"))));
  EXPECT_EQ(std::count(warning.begin(), warning.end(), '\n'), 1) << warning;
  EXPECT_THAT(warnings({"--data.tokenizer", "bytes"}), HasSubstr("model/tokenizer.json"));
}

// The run folder has what names the tokens, under names that do not make it a model's folder.
TEST_F(ModelFolder, ARunKeepsTheFilesThatNameTheEndOfText) {
  const auto end = [](const SavedTokenizer& saved) {
    return data::Tokenizer::open(saved.name, saved.model_folder).end_of_text();
  };
  const auto saved_of = [](const std::string& tokenizer, const std::string& run) {
    TrainConfig config;
    config.data.tokenizer = tokenizer;
    const std::string crc = tokenizer_crc(tokenizer);
    formats::Manifest manifest{.config = to_json(config)};
    if (!crc.empty()) manifest.state = {{"tokenizer", "{\"crc32c\":\"" + crc + "\"}"}};
    return saved_tokenizer(manifest, run + "/checkpoints/step-00000005");
  };
  give_tokenizer("model/tokenizer.json");
  EXPECT_EQ(open_tokenizer(config_of({})).end_of_text(), 257);
  open({"--run.dir", "own", "--model.path", "model"});
  const SavedTokenizer own = saved_of(path("model/tokenizer.json"), "own");
  EXPECT_EQ(own.name, path("own/tokenizer.json"));
  EXPECT_EQ(own.files.config, path("own/model_config.json"));
  EXPECT_EQ(read_file(own.files.config), read_file("model/config.json"));
  EXPECT_EQ(read_file(own.files.generation_config), read_file("model/generation_config.json"));
  EXPECT_EQ(end(own), 257);
  EXPECT_FALSE(fs::exists("own/config.json"));
  // Another tokenizer has other ids.
  write_file("other.json", read_file("model/tokenizer.json") + "\n");
  EXPECT_EQ(open_tokenizer(config_of({"--data.tokenizer", "other.json"})).end_of_text(), 299);
  open({"--run.dir", "other", "--model.path", "model", "--data.tokenizer", "other.json"});
  EXPECT_EQ(end(saved_of(path("other.json"), "other")), 299);
  EXPECT_FALSE(fs::exists("other/generation_config.json"));
  // The tokenizer of a model that has none in its folder, and token files.
  fs::rename("model/tokenizer.json", "moved.json");
  EXPECT_EQ(open_tokenizer(config_of({"--data.tokenizer", "moved.json"})).end_of_text(), 257);
  open({"--run.dir", "moved", "--model.path", "model", "--data.tokenizer", "moved.json"});
  EXPECT_EQ(end(saved_of(path("moved.json"), "moved")), 257);
  open({"--run.dir", "ids", "--model.path", "model", "--data.path", "ids.bin"});
  EXPECT_EQ(saved_of("bytes", "ids").files.config, path("ids/model_config.json"));
  open({"--run.dir", "bytes", "--model.path", "model", "--data.tokenizer", "bytes"});
  EXPECT_EQ(saved_of("bytes", "bytes").files.config, "");
}

}  // namespace
}  // namespace lockstep::config
