// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/train_arguments.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>

#include "lockstep/config/schema/schema_text.h"
#include "lockstep/core/error.h"
#include "tests/support/says.h"
#include "tests/support/subprocess.h"

namespace lockstep::config {
namespace {

using test::says;
using testing::HasSubstr;
using testing::ThrowsMessage;
using Words = std::vector<std::string>;

// A file of this test, removed with it.
class ConfigFile {
 public:
  explicit ConfigFile(const std::string& text) { test::write_file(path(), text); }
  std::string path() const { return folder_.path() + "/run.toml"; }

 private:
  test::TempDir folder_;
};

void expect_refused(const Words& words, const std::string& message) {
  EXPECT_THAT([&] { parse_train_arguments(words); }, ThrowsMessage<ConfigError>(says(message)));
}

TEST(TrainArguments, FlagsInBothForms) {
  const auto parsed =
      parse_train_arguments({"-n", "4", "--train.steps=20", "--data.path", "a=b.txt",
                             "--train.steps", "30", "--optim.lr=-0", "--metrics.file="});
  EXPECT_EQ(parsed.ranks, 4);
  EXPECT_EQ(parsed.config.train.steps, 30);  // the last of two
  EXPECT_EQ(parsed.config.data.path, "a=b.txt");
  EXPECT_EQ(parsed.config.metrics.file, "");
  EXPECT_EQ(parsed.origins.at("train.steps"), Origin::flag);
  EXPECT_EQ(parsed.origins.at("train.seq_len"), Origin::by_default);
  EXPECT_FALSE(parsed.print_config);
  EXPECT_FALSE(parsed.help);
  EXPECT_EQ(parse_train_arguments({}).config, TrainConfig{});
  EXPECT_EQ(parse_train_arguments({}).ranks, std::nullopt);
}

TEST(TrainArguments, ShortForms) {
  const auto parsed = parse_train_arguments(
      {"-n4",     "--steps",  "7",        "--lr=0.5",      "--data",   "a.txt",  "--seq-len",
       "8",       "--batch",  "6",        "--micro-batch", "3",        "--seed", "9",
       "--dtype", "bfloat16", "--device", "cpu",           "--resume", "auto"});
  EXPECT_EQ(parsed.ranks, 4);
  const TrainConfig& config = parsed.config;
  EXPECT_EQ(config.train.steps, 7);
  EXPECT_EQ(config.optim.lr, 0.5);
  EXPECT_EQ(config.data.path, "a.txt");
  EXPECT_EQ(config.train.seq_len, 8);
  EXPECT_EQ(config.train.global_batch, 6);
  EXPECT_EQ(config.train.micro_batch, 3);
  EXPECT_EQ(config.train.seed, 9);
  EXPECT_EQ(config.train.dtype, Precision::bfloat16);
  EXPECT_EQ(config.train.device, DeviceKind::cpu);
  EXPECT_EQ(config.checkpoint.resume, "auto");
  EXPECT_EQ(parsed.origins.at("train.steps"), Origin::flag);
  // A file has full names, and says which one is meant.
  const ConfigFile file("steps = 5\n");
  expect_refused({"--config", file.path()}, file.path() + ":1: steps ... train.steps");
}

TEST(TrainArguments, FlagOverFile) {
  const ConfigFile file("[train]\nsteps = 5\nseq_len = 64\n");
  for (const Words& words : {Words{"--train.steps", "6", "--config", file.path()},
                             Words{"--config=" + file.path(), "--train.steps", "6"}}) {
    const auto parsed = parse_train_arguments(words);
    EXPECT_EQ(parsed.config.train.steps, 6);
    EXPECT_EQ(parsed.config.train.seq_len, 64);
    EXPECT_EQ(parsed.config_file, file.path());
    EXPECT_EQ(parsed.origins.at("train.seq_len"), Origin::file);
    EXPECT_EQ(parsed.origins.at("train.steps"), Origin::flag);
  }
}

TEST(TrainArguments, RefusesBadFlags) {
  expect_refused({"--train.step", "5"}, "--train.step ... train.steps");
  expect_refused({"--warmup", "5"}, "--warmup ... optim.warmup");
  expect_refused({"--train.step"}, "--train.step ... train.steps");
  expect_refused({"--learning-rate", "5"}, "--learning-rate ... optim.lr");
  expect_refused({"--batch_size", "5"}, "--batch_size ... train.global_batch");
  expect_refused({"--epochs", "5"}, "--epochs ... train.steps");
  expect_refused({"--lr-scheduler", "cosine"}, "--lr-scheduler ... optim.schedule");
  expect_refused({"--config", "run.yaml"}, "run.yaml ... not TOML or JSON");
  expect_refused({"--train.steps"}, "--train.steps needs a value");
  expect_refused({"--train.steps", "--train.seed"}, "--train.steps needs a value");
  expect_refused({"--train.reproducible", "yes"},
                 "--train.reproducible is 'yes' ... true or false");
  expect_refused({"-n", "0"}, "-n is '0' ... whole number ... at least 1");
  expect_refused({"-n", "two"}, "-n is 'two' ... whole number ... at least 1");
  expect_refused(
      {"file.toml"},
      "'file.toml' is not understood; options are --SECTION.KEY VALUE, and --help lists them");
  expect_refused({"--print-config=yes"}, "--print-config takes no value, but has 'yes'");
  expect_refused({"--config", "a", "--config", "b"}, "--config ... twice ... a was");
  expect_refused({"--config", "/nowhere/x"}, "/nowhere/x: No such file or directory");
  const ConfigFile file("[train]\nsteps = 5\n\nseqlen = 64\n");
  expect_refused({"--config", file.path()}, file.path() + ":4: train.seqlen ... train.seq_len");
}

TEST(TrainArguments, RanksHaveAllInCommonButWhatBelongsToAHost) {
  const auto lines = [](const std::vector<std::string>& arguments) {
    return common_lines(parse_train_arguments(arguments).config);
  };
  const std::string plain = lines({});
  EXPECT_THAT(plain, HasSubstr("model.hidden = "));
  EXPECT_NE(lines({"--model.hidden", "32"}), plain);
  EXPECT_NE(lines({"--optim.lr", "0.5"}), plain);
  EXPECT_NE(lines({"--parallel.shard", "full"}), plain);
  EXPECT_EQ(lines({"--data.path", "/here", "--checkpoint.dir", "/there", "--train.threads", "3"}),
            plain);
}

TEST(TrainArguments, HelpComesFirst) {
  EXPECT_TRUE(parse_train_arguments({"--nonsense", "--help"}).help);
  EXPECT_TRUE(parse_train_arguments({"-h"}).help);
  EXPECT_TRUE(parse_train_arguments({"--print-config"}).print_config);
}

TEST(TrainArguments, PrintedConfigReadsBack) {
  const Words words{"--train.steps",
                    "77",
                    "--optim.betas",
                    "0.8,0.9",
                    "--optim.lr",
                    "3e-4",
                    "--data.path",
                    "some \"data\".txt",
                    "--model.kind",
                    "llama",
                    "--optim.warmup",
                    "0",
                    "--memory.max_per_device",
                    "8GB",
                    "--parallel.schedule",
                    "1f1b",
                    "--model.rope_scaling",
                    "8,1,4,8192",
                    "--data.validation",
                    "0.1"};
  const auto parsed = parse_train_arguments(words);
  const std::string printed = print_config(parsed);
  EXPECT_THAT(printed, HasSubstr("max_per_device = \"8GB\""));
  EXPECT_THAT(printed, HasSubstr("[train]\nsteps = 77                                # flag\n"
                                 "seq_len = 256                             # default\n"));
  const ConfigFile file(printed);
  const auto again = parse_train_arguments({"--config", file.path()});
  EXPECT_EQ(again.config, parsed.config);
  EXPECT_EQ(again.origins.at("train.seq_len"), Origin::file);
}

TEST(TrainArguments, HelpFitsATerminal) {
  const std::string help = train_help();
  std::istringstream lines(help);
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 98u) << line;
  TrainConfig config;
  const Schema schema = train_schema(config);
  for (const Section& section : schema.sections())
    for (const Option& option : section.options)
      EXPECT_THAT(help, HasSubstr("  --" + option.name + " "));
}

// docs/configuration.md comes from the schema. LOCKSTEP_UPDATE_HELP=1 writes the page again.
TEST(TrainArguments, ReferencePageIsCurrent) {
  TrainConfig config;
  const std::string page =
      "# Configuration of a training run\n\n"
      "Every key is a flag of `lockstep train` and a key of its configuration file, with the same "
      "name and meaning. Ten flags also have a short form:\n\n"
      "    lockstep train -n 2 --config run.toml --train.steps 500\n"
      "    lockstep train -n2 --config run.toml --steps 500\n\n"
      "A file is TOML or JSON:\n\n"
      "    [train]                        {\"train\": {\"steps\": 500},\n"
      "    steps = 500                     \"optim.lr\": 3e-4}\n"
      "    [optim]\n"
      "    lr = 3e-4\n\n"
      "A flag overrides the file, and the file overrides the default. If a flag is given twice, "
      "the "
      "last one counts. `--print-config` prints the\n"
      "resulting configuration as TOML, with the origin of each value; `--config` accepts this "
      "output. An unknown name is an error that suggests\nthe nearest known name.\n"
      "Sizes in bytes may have a unit (KB, MB, GB, TB: powers of 1024). Lists are `[0.9, 0.95]` in "
      "files, `0.9,0.95` in flags. Names of choices\n"
      "may be written with hyphens or underscores. Paths are relative to where the command is "
      "started.\n\n"
      "TOML files may contain comments, sections, dotted keys, strings on one line, numbers, true "
      "and false, and lists of numbers.\n\n"
      "A test generates this page from the program's table of options, "
      "`lockstep/config/train_schema.cpp`.\n" +
      markdown_text(train_schema(config));
  const std::string path = LOCKSTEP_SOURCE_DIR "/docs/configuration.md";
  if (const char* update = std::getenv("LOCKSTEP_UPDATE_HELP"); update != nullptr && *update == '1')
    std::ofstream(path) << page;
  std::ostringstream kept;
  kept << std::ifstream(path).rdbuf();
  EXPECT_EQ(kept.str(), page) << "if that is meant, run this test with LOCKSTEP_UPDATE_HELP=1";
}

}  // namespace
}  // namespace lockstep::config
