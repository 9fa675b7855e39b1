// SPDX-License-Identifier: Apache-2.0
// Runs with folders, in a working directory of their own.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "lockstep/config/run_folder.h"
#include "lockstep/config/run_tokenizer.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "tests/cli/checkpoint/models.h"
#include "tests/support/subprocess.h"

namespace lockstep::config {

// In a folder of its own, where runs/ appears.
class RunFolderTest : public testing::Test {
 protected:
  RunFolderTest() { std::filesystem::current_path(folder_.path()); }
  ~RunFolderTest() override {
    log::copy_to("");
    unsetenv("TORCHELASTIC_RUN_ID");
    std::filesystem::current_path(before_);
  }

  static TrainArguments parsed(const std::vector<std::string>& words) {
    std::vector<std::string> all{"--data.path", "text.txt"};
    all.insert(all.end(), words.begin(), words.end());
    return parse_train_arguments(all);
  }
  // The path of the folder that a run with these arguments gets.
  static std::string open(const std::vector<std::string>& words, const RankEnv& env = {}) {
    const TrainArguments arguments = parsed(words);
    RunFolder folder(arguments, env);
    TrainConfig config = arguments.config;
    adopt(config, folder.open(config.model.resolved(config.train.seq_len, 256)));
    EXPECT_EQ(config, folder.config());
    return config.run.dir;
  }
  static void expect_refused(const std::vector<std::string>& words,
                             const std::vector<std::string>& facts) {
    try {
      open(words);
      FAIL() << testing::PrintToString(words);
    } catch (const ConfigError& failure) {
      for (const std::string& fact : facts) EXPECT_THAT(failure.what(), testing::HasSubstr(fact));
    }
  }
  static void pretend_checkpoint(const std::string& run) {
    std::filesystem::create_directories(run + "/checkpoints/step-00000005");
    test::write_file(run + "/checkpoints/step-00000005/manifest.json", "{}");
  }
  std::string path(const std::string& name) const { return folder_.path() + "/" + name; }

  // A run with a small model that has saved steps 3 and 5, of which 3 was the best.
  static void make_run(const std::string& run, const std::vector<std::string>& options = {}) {
    std::vector<std::string> words{"--run.dir",      run,  "--steps",        "30",
                                   "--seq-len",      "16", "--model.layers", "1",
                                   "--model.hidden", "8",  "--model.heads",  "2"};
    words.insert(words.end(), options.begin(), options.end());
    open(words);
    const TrainConfig config = read_run_config(run);
    std::map<std::string, std::string> state;
    if (const std::string crc = tokenizer_crc(config.data.tokenizer); !crc.empty())
      state = {{"tokenizer", "{\"crc32c\":\"" + crc + "\"}"}};
    for (const int64_t step : {3, 5}) {
      test::save_model(run + "/checkpoints", config, {}, {.step = step, .state = state});
    }
    formats::link_best(run + "/checkpoints", 3);
  }
  static TrainConfig begun(const std::vector<std::string>& words) {
    return RunFolder(parsed(words), {}).config();
  }

 private:
  const std::string before_ = std::filesystem::current_path();
  const test::TempDir folder_;
};
}  // namespace lockstep::config
