// SPDX-License-Identifier: Apache-2.0
// The folder of a run as users meet it: what is in it, and what can be done with it later.
#include <gmock/gmock.h>

#include <csignal>
#include <filesystem>

#include "tests/data/tokenizer/small_tokenizer.h"
#include "tests/train/train_command.h"

namespace lockstep::test {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

class RunFolder : public Train {
 protected:
  RunFolder() { write_small_tokenizer(tokenizer(), 256); }

  std::string tokenizer() const { return path("tokenizer.json"); }
  // With all files where they belong by default.
  Words in(const std::string& run, const Words& options) const {
    return command(Words{"--run.dir", run, "--checkpoint.dir", "auto", "--metrics.file", "auto"} +
                   options);
  }
  static void train(Words words) {
    words.erase(words.begin());  // the verb
    EXPECT_NO_THROW(train_in_threads(words));
  }
  // In the temporary folder, where runs/ appears.
  Words at_home(const Words& words) const {
    return Words{"sh", "-c", "cd \"$0\" && exec \"$@\"", folder_.path()} + words;
  }
  std::vector<std::string> runs() const {
    std::vector<std::string> found;
    for (const auto& entry : fs::directory_iterator(path("runs"))) found.push_back(entry.path());
    return found;
  }
};

TEST_F(RunFolder, IsCompleteAndCanBeMoved) {
  const Result first =
      lockstep_command(in(path("run"), {"-n", "2", "--train.steps", "4", "--data.tokenizer",
                                        tokenizer(), "--metrics.trace", "auto"}));
  ASSERT_EQ(first.code, 0) << first.err;
  EXPECT_THAT(first.out, HasSubstr("\nrun    " + path("run") + "\n"));
  EXPECT_EQ(read_file(path("run/log.txt")), first.out);
  EXPECT_EQ(read_file(path("run/tokenizer.json")), read_file(tokenizer()));
  EXPECT_EQ(read_steps(path("run/metrics.jsonl")).size(), 4U);
  EXPECT_EQ(std::distance(fs::directory_iterator(path("run/traces")), {}), 2);
  const auto environment = json::parse(read_file(path("run/environment.jsonl")));
  for (const char* key : {"started", "lockstep", "libtorch", "compiler", "commit", "backend"})
    EXPECT_TRUE(environment.contains(key)) << key;
  EXPECT_EQ(environment["world_size"], 2);
  ASSERT_EQ(environment["ranks"].size(), 2U);
  EXPECT_EQ(environment["ranks"][0]["device"], environment["ranks"][1]["device"]);
  EXPECT_THAT(environment["command"].dump(), HasSubstr("--train.steps"));
  for (const char* file : {"run/config.toml", "run/checkpoints/step-00000004/manifest.json"})
    EXPECT_THAT(read_file(path(file)), Not(HasSubstr(path("run")))) << file;

  fs::rename(path("run"), path("moved"));
  fs::remove(tokenizer());
  const Result more = lockstep_command({"train", "--resume", path("moved"), "--steps", "6"});
  ASSERT_EQ(more.code, 0) << more.err;
  EXPECT_THAT(more.out,
              AllOf(HasSubstr("2 ranks"), HasSubstr("moved/checkpoints/step-00000004 at step 4")));
  EXPECT_EQ(more.err, "");
  EXPECT_EQ(read_file(path("moved/log.txt")), first.out + more.out);
  EXPECT_EQ(read_steps(path("moved/metrics.jsonl")).size(), 6U);
  EXPECT_FALSE(fs::exists(path("run")));
  const std::string environments = read_file(path("moved/environment.jsonl"));
  EXPECT_EQ(std::count(environments.begin(), environments.end(), '\n'), 2);

  for (const Words& words :
       std::vector<Words>{{"sample", "--train.threads", "1", "--checkpoint", path("moved"),
                           "--prompt", "int", "--tokens", "3"},
                          {"checkpoint", "export", path("moved"), path("model")},
                          {"checkpoint", "inspect", path("moved")},
                          {"checkpoint", "verify", "--all", path("moved")}}) {
    const Result result = lockstep_command(words);
    EXPECT_EQ(result.code, 0) << result.err;
    if (words[0] == "sample") {
      EXPECT_THAT(result.err, HasSubstr("step-00000006"));
    } else {
      EXPECT_EQ(result.err, "");
    }
  }
  EXPECT_TRUE(fs::exists(path("model/tokenizer.json")));
}

TEST_F(RunFolder, IsEnoughToFineTuneItsModel) {
  train(in(path("base"), {"--train.steps", "4", "--train.eval_every", "2", "--checkpoint.best",
                          "true", "--data.tokenizer", tokenizer()}));
  fs::remove(tokenizer());
  write_file(path("tune.jsonl"), "{\"prompt\": \"int \", \"completion\": \"f1(int x)\"}\n");
  const Words tune{"--checkpoint.load", "model", "--data",    path("tune.jsonl"), "--steps", "2",
                   "--data.validation", "0",     "--run.dir", path("tuned")};
  train(Words{"train", "--resume", path("base/best")} + tune);
  EXPECT_EQ(read_steps(path("tuned/metrics.jsonl")).size(), 2U);
  EXPECT_THAT(read_file(path("tuned/config.toml")),
              AllOf(HasSubstr("hidden = 32"), HasSubstr(path("base/tokenizer.json"))));
  train({"train", "--resume", path("base/best"), "--run.dir", path("branch"), "--steps", "6"});
  EXPECT_TRUE(fs::exists(path("branch/checkpoints/step-00000006")));
  EXPECT_FALSE(fs::exists(path("base/checkpoints/step-00000006")));
  const Result sampled = lockstep_command({"sample", "--train.threads", "1", "--checkpoint",
                                           path("base/best"), "--prompt", "int", "--tokens", "3"});
  EXPECT_EQ(sampled.code, 0) << sampled.err;
}

TEST_F(RunFolder, AResumeSaysWhatIsDifferent) {
  train(in(path("run"), {"--train.steps", "4", "--data.tokenizer", tokenizer()}));
  const Words resume{"train", "--resume", path("run")};
  const Result past = lockstep_command(resume);
  EXPECT_EQ(past.code, 0) << past.err;
  EXPECT_THAT(past.err, AllOf(HasSubstr("at step 4"), HasSubstr("train.steps is 4")));
  EXPECT_THAT(read_file(path("run/log.txt")), HasSubstr(past.err));

  const std::string config = read_file(path("run/config.toml"));
  write_file(path("other.json"), read_file(tokenizer()) + "\n");
  write_file(path("other.txt"), some_text(500));
  const Words changed{
      "--steps",          "6",      "--batch",        "4", "--seq-len", "16", "--data.tokenizer",
      path("other.json"), "--data", path("other.txt")};
  const Result refused = lockstep_command(resume + changed);
  EXPECT_NE(refused.code, 0);
  EXPECT_THAT(refused.err, HasSubstr("--checkpoint.other_data true"));
  EXPECT_EQ(read_file(path("run/config.toml")), config);
  const Result warned =
      lockstep_command(resume + changed + Words{"--checkpoint.other_data", "true"});
  EXPECT_EQ(warned.code, 0) << warned.err;
  const auto tokens = [](int lines) { return std::to_string(some_text(lines).size()) + " tokens"; };
  EXPECT_THAT(warned.err,
              AllOf(HasSubstr("train.global_batch 8, now it is 4"),
                    HasSubstr("train.seq_len 32, now it is 16"), HasSubstr(path("other.json")),
                    HasSubstr(tokenizer()), HasSubstr(data()), HasSubstr(path("other.txt")),
                    HasSubstr(tokens(400)), HasSubstr(tokens(500))));
  // What it was resumed with is the run's from now on.
  train(resume + Words{"--steps", "8"});
  EXPECT_EQ(read_steps(path("run/metrics.jsonl")).size(), 8U);
  EXPECT_THAT(read_file(path("run/config.toml")), HasSubstr(path("other.txt")));
  EXPECT_THAT(read_file(path("run/config.toml")), HasSubstr(path("other.json")));
}

// Two ranks that our launcher starts: they agree on one folder, also after one was killed.
TEST_F(RunFolder, ARestartContinuesInItsOwnFolder) {
  Words words = in("auto", {"--train.steps", "100000", "--checkpoint.every", "1"});
  Subprocess process(at_home(
      Words{LOCKSTEP_COMMAND, "run", "-n", "2", "--max-restarts", "1", LOCKSTEP_COMMAND} + words));
  const auto printed = [&](const std::string& text) {
    return eventually([&] { return process.out().find(text) != std::string::npos; });
  };
  ASSERT_TRUE(printed(": saved ")) << process.err();
  pid_t rank = 0;
  for (const pid_t pid : process.others()) {
    if (read_file("/proc/" + std::to_string(pid) + "/cmdline").find("lockstep-torch") < 4096)
      rank = pid;
  }
  ASSERT_NE(rank, 0);
  ::kill(rank, SIGKILL);
  ASSERT_TRUE(printed("resume runs/")) << process.out() << process.err();
  process.kill(SIGTERM);
  EXPECT_EQ(process.wait().code, 75);
  ASSERT_EQ(runs().size(), 1U);
  const auto steps = read_steps(runs()[0] + "/metrics.jsonl");
  for (size_t i = 0; i < steps.size(); ++i) EXPECT_EQ(steps[i]["step"], i + 1);
  EXPECT_THAT(process.out(), HasSubstr("run    runs/" + fs::path(runs()[0]).filename().string()));
}

TEST_F(RunFolder, AFailureToMakeItReachesEveryRank) {
  write_file(path("file"), "");
  const Words words = in(path("file/below"), {"--train.steps", "4"});
  const Result alone = lockstep_command(words);
  EXPECT_EQ(alone.code, 2);
  EXPECT_EQ(std::count(alone.err.begin(), alone.err.end(), '\n'), 1) << alone.err;
  EXPECT_THAT(alone.err, AllOf(HasSubstr("run.dir"), HasSubstr(path("file"))));
  const Result both =
      lockstep_command(Words{"run", "-n", "2", "--grace", "5000", LOCKSTEP_COMMAND} + words);
  EXPECT_EQ(both.code, 2);
  for (const char* rank : {"[rank0]: lockstep: ", "[rank1]: lockstep: "}) {
    const size_t at = both.err.find(rank);
    ASSERT_NE(at, std::string::npos) << both.err;
    EXPECT_THAT(both.err.substr(at, both.err.find('\n', at) - at), HasSubstr(path("file")));
  }
}

// The weights are in the checkpoint, and the sizes and the tokenizer in the folder.
TEST_F(RunFolder, AModelThatWasImportedIsNotNeededAgain) {
  train(in(path("base"), {"--train.steps", "4", "--data.tokenizer", tokenizer()}));
  const Result exported = lockstep_command({"checkpoint", "export", path("base"), path("model")});
  ASSERT_EQ(exported.code, 0) << exported.err;
  train(in(path("tuned"), {"--train.steps", "4", "--model.path", path("model")}));
  fs::remove_all(path("model"));
  fs::remove(tokenizer());
  train({"train", "--resume", path("tuned"), "--steps", "6"});
  EXPECT_EQ(read_steps(path("tuned/metrics.jsonl")).size(), 6U);
  EXPECT_THAT(read_file(path("tuned/config.toml")), HasSubstr("path = \"" + path("model") + "\""));
}

TEST_F(RunFolder, ExportWithoutATokenizerWarns) {
  train(in(path("run"), {"--train.steps", "4"}));
  const Result result = lockstep_command({"checkpoint", "export", path("run"), path("model")});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.err, AllOf(HasSubstr("tokenizer.json"), HasSubstr("bytes")));
}

}  // namespace
}  // namespace lockstep::test
