// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/run_tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "lockstep/config/input_files.h"
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
