// SPDX-License-Identifier: Apache-2.0
// The trainer as its users meet it: the command, its files, its exit codes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cmath>
#include <csignal>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/says.h"
#include "tests/support/subprocess.h"
#include "tests/train/train_command.h"

namespace lockstep::test {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

TEST_F(Train, LossesDoNotDependOnTheNumberOfRanks) {
  const Words llama{"--model.kind", "llama", "--model.dropout", "0.1"};
  const auto with = [&](const char* ranks, const Words& more) {
    Words words{"-n", ranks};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  for (const Words& model : {Words{"--model.dropout", "0.1"}, llama}) {
    const auto one = steps("one" + model.back() + model[1], with("1", model));
    ASSERT_EQ(one.size(), 20U);
    EXPECT_LT(one.back()["loss"].get<double>(), 0.75 * one.front()["loss"].get<double>());
    for (const char* ranks : {"2", "4"}) {
      const bool processes = model.size() == 2;
      const auto many = processes ? steps_of_processes(ranks + model[1], with(ranks, model))
                                  : steps(ranks + model[1], with(ranks, model));
      expect_close(losses(many), losses(one), 1e-5);
    }
  }
}

// Four micro-batches over three ranks: two places in a step are padding.
TEST_F(Train, RanksWithFewerMicroBatchesFollowOneProcess) {
  // Of gpt, gradients near zero (biases of keys) become whole steps of AdamW in either direction.
  const Words options{"--model.kind",  "llama", "--model.dropout",    "0.1",
                      "--train.steps", "8",     "--train.eval_every", "4"};
  const auto one = steps("one", options);
  std::vector<Words> layouts{
      {"-n", "3"}, {"-n", "3", "--parallel.shard", "full"}, {"-n", "6", "--parallel.pp", "2"}};
  if (tests_all()) {
    layouts.insert(layouts.end(), {{"-n", "3", "--parallel.shard", "optimizer"},
                                   {"-n", "6", "--parallel.tp", "2"},
                                   {"-n", "6", "--parallel.pp", "2", "--parallel.shard", "grad_op"},
                                   {"-n", "3", "--parallel.shard", "full", "--offload.optimizer",
                                    "true", "--offload.params", "true"},
                                   {"-n", "3", "--train.recompute", "full"},
                                   {"-n", "3", "--comm.backend", "gloo"}});
  }
  for (const Words& layout : layouts)
    expect_follows("layout" + std::to_string(&layout - layouts.data()), options + layout, one);
  // As powers of two do, with a rank that has nothing to compute.
  const Words bits{"--train.reproducible", "true", "--train.global_batch", "12",
                   "--train.steps",        "4"};
  const auto same = losses(steps("bits", bits));
  EXPECT_EQ(losses(steps("bits4", bits + Words{"-n", "4"})), same);
  EXPECT_EQ(losses(steps("bits4full", bits + Words{"-n", "4", "--parallel.shard", "full"})), same);
}

TEST_F(Train, ReproducibleRunsAreTheSameBits) {
  const Words options{"--train.reproducible", "true", "--model.dropout", "0.1"};
  int run_number = 0;
  const auto bits = [&](const Words& layout) {
    Words words = options;
    words.insert(words.end(), layout.begin(), layout.end());
    std::string all;
    for (const json& step : steps("run" + std::to_string(run_number++), words)) {
      all += step["loss"].dump() + " " + step["grad_norm"].dump() + "\n";
    }
    return all;
  };
  const std::string one = bits({"-n", "1"});
  EXPECT_EQ(bits({"-n", "2"}), one);
  EXPECT_EQ(bits({"-n", "4"}), one);
  EXPECT_EQ(bits({"-n", "2", "--parallel.shard", "full"}), one);
  EXPECT_EQ(bits({"-n", "4", "--parallel.shard", "grad_op"}), one);
  EXPECT_EQ(bits({"-n", "2", "--parallel.shard", "optimizer", "--comm.backend", "gloo"}), one);
  EXPECT_EQ(bits({"-n", "4", "--parallel.shard", "hybrid", "--parallel.shard_size", "2"}), one);
  EXPECT_EQ(
      bits({"-n", "2", "--parallel.shard", "optimizer", "--parallel.shard_granularity", "tensors"}),
      one);
}

TEST_F(Train, ShardedRunsFollowOneProcessAndResumeInOtherLayouts) {
  const Words llama{"--model.kind",       "llama", "--train.recompute", "full",
                    "--train.eval_every", "10"};
  const auto with = [&](const Words& more) {
    Words words = llama;
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  const auto one = steps("one", with({"-n", "1"}));
  for (const char* shard : {"full", "grad_op", "optimizer", "hybrid"}) {
    SCOPED_TRACE(shard);
    const Words layout{"-n", "2", "--parallel.shard", shard};
    const auto first = steps(shard, with(layout));
    expect_close(losses(first), losses(one), 1e-5);
    const auto all =
        steps(shard, with({"-n", "4", "--train.steps", "22", "--checkpoint.resume", "auto"}));
    ASSERT_EQ(all.size(), 22U);
    // The first 20 are those of the run before, with their times: they were not trained again.
    EXPECT_TRUE(std::equal(first.begin(), first.end(), all.begin()));
    EXPECT_LT(all.back()["loss"].get<double>(), 0.75 * all.front()["loss"].get<double>());
  }
}

TEST_F(Train, AResumedRunHasTheLossesOfAnUninterruptedOne) {
  const auto whole = steps("whole", {"-n", "2"});
  // Ten steps of the twenty: a signal ends the first part where its checkpoint is.
  const Words part{"-n",
                   "2",
                   "--checkpoint.dir",
                   path("part"),
                   "--metrics.file",
                   path("part.jsonl"),
                   "--checkpoint.every",
                   "10"};
  ASSERT_EQ(run(part).code, 0);
  fs::remove_all(path("part/step-00000020"));
  Words again = part;
  again.insert(again.end(), {"--checkpoint.resume", "auto"});
  const Result resumed = run(again);
  ASSERT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_THAT(resumed.out, HasSubstr("at step 10"));
  const auto parts = read_steps(path("part.jsonl"));
  ASSERT_EQ(parts.size(), 20U);
  for (size_t i = 0; i < parts.size(); ++i) {
    EXPECT_EQ(parts[i]["loss"], whole[i]["loss"]) << i;
    EXPECT_EQ(parts[i]["grad_norm"], whole[i]["grad_norm"]) << i;
  }
  // A finished run has nothing left to do.
  const Result finished = run(again);
  EXPECT_EQ(finished.code, 0) << finished.err;
  EXPECT_EQ(read_steps(path("part.jsonl")).size(), 20U);
}

TEST_F(Train, ASignalSavesAndExits75) {
  for (const int signal : {SIGTERM, SIGINT}) {
    const std::string dir = path("stopped" + std::to_string(signal));
    Words words{LOCKSTEP_COMMAND};
    const Words options = command({"-n", "2", "--train.steps", "100000", "--checkpoint.dir", dir,
                                   "--metrics.file", dir + ".jsonl"});
    words.insert(words.end(), options.begin(), options.end());
    Subprocess process(words);
    ASSERT_TRUE(eventually([&] {
      return fs::exists(dir + ".jsonl") &&
             read_file(dir + ".jsonl").find("\"step\":3") != std::string::npos;
    }));
    process.kill(signal);
    const Result result = process.wait();
    EXPECT_EQ(result.code, 75) << result.out << result.err;
    EXPECT_THAT(result.out, HasSubstr("stopped at step"));
    const auto done = read_steps(dir + ".jsonl").size();
    Words resume =
        command({"-n", "2", "--train.steps", std::to_string(done + 2), "--checkpoint.dir", dir,
                 "--metrics.file", dir + ".jsonl", "--checkpoint.resume", "auto"});
    const Result resumed = lockstep_command(resume);
    EXPECT_EQ(resumed.code, 0) << resumed.err;
    EXPECT_EQ(read_steps(dir + ".jsonl").size(), done + 2);
  }
}

TEST_F(Train, MetricsHaveWhatTheyPromise) {
  const auto all = steps_of_processes("metrics", {"-n", "2", "--train.eval_every", "10"});
  ASSERT_EQ(all.size(), 20U);
  for (const json& step : all) {
    for (const char* key :
         {"step", "loss", "grad_norm", "lr", "tokens_per_s", "step_ms", "comm_ms", "peak_bytes"}) {
      EXPECT_TRUE(step.contains(key)) << key;
    }
    EXPECT_GT(step["peak_bytes"].get<int64_t>(), 1 << 20);
    EXPECT_GT(step["comm_ms"].get<double>(), 0);
    EXPECT_LT(step["comm_ms"].get<double>(), step["step_ms"].get<double>());
  }
  EXPECT_EQ(all[0]["step"], 1);
  EXPECT_NEAR(all[0]["lr"].get<double>(), 1e-2 / 2, 1e-9);
  // Twice while it runs; the second is also the end.
  const std::string text = read_file(path("metrics.jsonl"));
  size_t count = 0;
  for (size_t at = text.find("validation_loss"); at != std::string::npos;
       at = text.find("validation_loss", at + 1)) {
    ++count;
  }
  EXPECT_EQ(count, 2U);
}

TEST_F(Train, RanksOfAnotherLauncher) {
  Words words{"run", "-n", "2", LOCKSTEP_COMMAND};
  const Words options = command({});
  words.insert(words.end(), options.begin(), options.end());
  const Result result = lockstep_command(words);
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("2 ranks"));
  expect_close(losses(read_steps(path("metrics.jsonl"))), losses(steps("alone", {})), 1e-5);
}

TEST_F(Train, EveryOptionHasItsEffect) {
  const Words few{"--train.steps", "8"};
  const auto plain = losses(steps("plain", few));
  // Those that change what is computed.
  for (const Words& option : std::vector<Words>{{"--optim.name", "sgd", "--optim.lr", "0.1"},
                                                {"--optim.betas", "0.5,0.9"},
                                                {"--optim.weight_decay", "1"},
                                                {"--optim.clip", "0.01"},
                                                {"--optim.schedule", "constant"},
                                                {"--optim.warmup", "0"},
                                                {"--model.tied", "false"},
                                                {"--model.ffn", "64"},
                                                {"--train.seed", "2"}}) {
    const auto changed = losses(steps(option[0] + option[1], few + option));
    EXPECT_GT(std::abs(changed.back() - plain.back()), 1e-6) << option[0];
  }
  // Those that do not.
  for (const Words& option : std::vector<Words>{{"--train.recompute", "full"},
                                                {"--train.recompute", "selective"},
                                                {"--memory.strategy", "aggressive"},
                                                {"--comm.backend", "gloo", "-n", "2"},
                                                {"--train.micro_batch", "4"}}) {
    expect_close(losses(steps(option[0] + option[1] + "2", few + option)), plain, 1e-5);
  }
}

TEST_F(Train, TraceShowsComputingAndCommunication) {
  steps_of_processes("traced", {"-n", "2", "--train.steps", "3", "--metrics.trace", path("trace")});
  std::string all;
  for (const auto& entry : fs::directory_iterator(path("trace"))) all += read_file(entry.path());
  EXPECT_THAT(all, AllOf(HasSubstr("\"step\""), HasSubstr("all_reduce")));
}

TEST_F(Train, OldCheckpointsArePruned) {
  steps("pruned", {"--checkpoint.every", "5", "--checkpoint.keep", "2"});
  EXPECT_FALSE(fs::exists(path("pruned/step-00000010")));
  EXPECT_TRUE(fs::exists(path("pruned/step-00000015")));
  EXPECT_TRUE(fs::exists(path("pruned/step-00000020")));
}

TEST_F(Train, ContinuesWithoutAReaderOfItsOutput) {
  // The shell closes stdout, and a reader goes away after a line.
  const std::string line = [&] {
    std::string text = LOCKSTEP_COMMAND;
    for (const std::string& word : command({"-n", "2"})) text += " '" + word + "'";
    return text;
  }();
  for (const std::string& how : {std::string(" >&-"), std::string(" | head -n 1")}) {
    fs::remove_all(path("checkpoints"));
    Subprocess shell({"sh", "-c", line + how});
    const Result result = shell.wait(milliseconds{120'000});
    EXPECT_EQ(result.code, 0) << how << result.err;
    EXPECT_EQ(read_steps(path("metrics.jsonl")).size(), 20U) << how;
  }
}

TEST_F(Train, PrintConfigReadsBack) {
  const Result first = run({"--print-config", "--optim.betas", "0.8,0.9"});
  ASSERT_EQ(first.code, 0) << first.err;
  write_file(path("config.toml"), first.out);
  const Result second =
      lockstep_command({"train", "--config", path("config.toml"), "--print-config"});
  EXPECT_EQ(second.code, 0) << second.err;
  EXPECT_THAT(second.out, HasSubstr("betas = [0.8, 0.9]"));
}

// Each ends in one line that names the value and the fix, starts nothing, and leaves nothing.
TEST_F(Train, BadInputIsOneClearLine) {
  write_file(path("empty.txt"), "");
  write_file(path("short.txt"), "short");
  write_file(path("bad.toml"), "[train]\nsteps = \"many\"\n");
  write_file(path("ids.bin"),
             std::string("\x01\x00\x02\x00\x2c\x01\x03\x00", 8) + std::string(400, '\0'));
  write_file(path("file"), "x");
  struct Case {
    Words options;
    std::vector<std::string> words;
  };
  const std::vector<Case> cases{
      {{"--data.path", path("missing.txt")}, {"missing.txt"}},
      {{"--data.path", path("empty.txt")}, {"empty.txt"}},
      {{"--data.path", path("short.txt")}, {"short.txt", "seq_len 32"}},
      {{"--data.path", path("ids.bin"), "--train.seq_len", "8", "--model.vocab", "256"},
       {"300", "256", "model.vocab"}},
      {{"--model.hidden", "30", "--model.heads", "4"}, {"30", "4"}},
      {{"--checkpoint.dir", path("file") + "/below"}, {path("file")}},
      {{"--config", path("bad.toml")}, {"train.steps", "many", "bad.toml"}},
      {{"-n", "0"}, {"-n", "0"}},
      {{"-n", "-3"}, {"-3"}},
      {{"-n", "5"}, {"8", "2", "5"}},
      {{"--train.setps", "3"}, {"setps", "train.steps"}},
      {{"--train.steps", "few"}, {"train.steps", "few"}},
      {{"--data.tokenizer", path("nothing.json")}, {"nothing.json"}},
      {{"--model.path", path("no_model")}, {"no_model"}},
      {{"--checkpoint.resume", path("nowhere")}, {"nowhere"}},
      {{"--memory.max_per_device", "200KB"},
       {"memory.max_per_device is 200 kB", "optimizer state"}},
      {{"--parallel.tp", "3", "-n", "3"}, {"parallel.tp", "3"}},
      {{"--metrics.file", path("file") + "/below.jsonl"}, {path("file")}},
  };
  for (const Case& bad : cases) {
    Words words{LOCKSTEP_COMMAND};
    const Words options = command(bad.options);
    words.insert(words.end(), options.begin(), options.end());
    SCOPED_TRACE(testing::PrintToString(bad.options));
    Subprocess process(words);
    const Result result = process.wait();
    EXPECT_NE(result.code, 0);
    EXPECT_EQ(result.out, "");
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
    for (const std::string& word : bad.words) EXPECT_THAT(result.err, HasSubstr(word));
  }
}

TEST_F(Train, DamagedCheckpointsAreRefused) {
  ASSERT_EQ(run({}).code, 0);
  const std::string checkpoint = path("checkpoints/step-00000020");
  // A run without --checkpoint.resume does not touch what is there.
  const Result second = run({});
  EXPECT_EQ(second.code, 2);
  EXPECT_THAT(second.err, HasSubstr("--checkpoint.resume auto"));
  std::string file;
  for (const auto& entry : fs::directory_iterator(checkpoint)) {
    if (entry.path().extension() == ".safetensors") file = entry.path();
  }
  std::string bytes = read_file(file);
  bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 1);
  write_file(file, bytes);
  const Result damaged = run({"--checkpoint.resume", checkpoint});
  EXPECT_EQ(damaged.code, 2);
  EXPECT_THAT(damaged.err, AllOf(HasSubstr(file), says("no other checkpoint")));
  EXPECT_EQ(std::count(damaged.err.begin(), damaged.err.end(), '\n'), 1) << damaged.err;
  const Result sampled = lockstep_command(
      {"sample", "--train.threads", "1", "--checkpoint", checkpoint, "--prompt", "int"});
  EXPECT_NE(sampled.code, 0);
  EXPECT_THAT(sampled.err, HasSubstr(file));
}

// What a run saves must not be taken for older than what another run left there.
TEST_F(Train, GoingBackNeedsAFolderOfItsOwn) {
  ASSERT_EQ(run({"--checkpoint.every", "10"}).code, 0);
  const std::string older = path("checkpoints/step-00000010");
  const Result back = run({"--checkpoint.resume", older});
  EXPECT_EQ(back.code, 2);
  EXPECT_THAT(back.err, HasSubstr("up to step 20"));
  const Result elsewhere =
      run({"--checkpoint.resume", older, "--checkpoint.dir", path("branch"), "--train.seed", "3"});
  EXPECT_EQ(elsewhere.code, 0) << elsewhere.err;
  EXPECT_THAT(elsewhere.err, HasSubstr("train.seed 1, now it is 3"));
  EXPECT_TRUE(fs::exists(path("branch/step-00000020")));
}

TEST_F(Train, AnotherModelsCheckpointIsRefusedBeforeAnythingStarts) {
  ASSERT_EQ(run({"--train.steps", "5"}).code, 0);
  for (const Words& other : std::vector<Words>{{"--model.hidden", "16"},
                                               {"--model.layers", "1"},
                                               {"--model.heads", "4"},
                                               {"--model.norm_epsilon", "0.1"},
                                               {"--checkpoint.load", "model", "--model.heads", "4"},
                                               {"--model.positions", "64"}}) {
    Words words{"--checkpoint.dir", "", "--checkpoint.resume", path("checkpoints")};
    words.insert(words.end(), other.begin(), other.end());
    const Result result = run(words);
    EXPECT_EQ(result.code, 2);
    EXPECT_THAT(result.err, says("another model ... " + other[other.size() - 2].substr(2) + " is"));
    EXPECT_THAT(result.err, HasSubstr(other.back()));
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  }
  // Where no path names the checkpoint, too.
  expect_refused({"--checkpoint.resume", "auto", "--model.heads", "4"}, "model.heads is 2 ... 4");
  const Words more{"--checkpoint.resume", "auto", "--train.steps", "6"};
  expect_refused(more + Words{"--optim.name", "sgd"},
                 "optim.name adamw ... sgd ... --checkpoint.load model");
}

// Weights that are lost: the run ends by itself, and its last good checkpoint stays.
TEST_F(Train, LossesThatAreNotFiniteEndTheRun) {
  const Result result =
      run({"--optim.lr", "1e30", "--optim.warmup", "0", "--optim.clip", "0", "--train.steps", "100",
           "--checkpoint.every", "1", "--checkpoint.keep", "1"});
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.err, HasSubstr("not finite"));
  EXPECT_FALSE(fs::exists(path("checkpoints/step-00000011")));
}

// The model fits, a step does not.
TEST_F(Train, ARankWithoutMemorySaysWhatItWasFor) {
  for (const char* ranks : {"1", "2"}) {
    const Result result =
        run({"-n", ranks, "--train.device", "cpu", "--train.seq_len", "64", "--train.micro_batch",
             "16", "--train.global_batch", "32", "--memory.max_per_device", "2MB"});
    EXPECT_NE(result.code, 0);
    for (const char* says :
         {"out of memory: ", " bytes asked for", "the limit is 2097152", "predicted  measured",
          "parameters", "gradients", "optimizer", "activations and buffers", "total"})
      EXPECT_THAT(result.err, testing::HasSubstr(says));
  }
  EXPECT_EQ(
      run({"--train.device", "cpu", "--memory.max_per_device", "50MB", "--train.steps", "4"}).code,
      0);
}

TEST_F(Train, SampleContinuesThePrompt) {
  ASSERT_EQ(run({"--train.steps", "5"}).code, 0);
  const Words words{"sample",       "--train.threads",   "1",
                    "--checkpoint", path("checkpoints"), "--prompt",
                    "int f",        "--tokens",          "12"};
  const Result first = lockstep_command(words);
  ASSERT_EQ(first.code, 0) << first.err;
  EXPECT_TRUE(first.out.starts_with("int f"));
  EXPECT_EQ(first.out.size(), 5U + 12 + 1);
  EXPECT_EQ(lockstep_command(words).out, first.out);
  EXPECT_THAT(first.err, HasSubstr("step 5"));
  EXPECT_EQ(std::count(first.err.begin(), first.err.end(), '\n'), 1) << first.err;
  const auto warned = [&](const std::string& prompt, const char* tokens) {
    const Result result = lockstep_command({"sample", "--train.threads", "1", "--checkpoint",
                                            path("checkpoints/step-00000005"), "--prompt", prompt,
                                            "--tokens", tokens});
    EXPECT_EQ(result.code, 0) << result.err;
    return result.err;
  };
  EXPECT_THAT(warned("int f", "30"), says("5 tokens ... --tokens 30 ... 32 positions"));
  EXPECT_EQ(warned("int f", "28"), "");
  const Result bad = lockstep_command({"sample", "--checkpoint", path("none"), "--prompt", "x"});
  EXPECT_EQ(bad.code, 2);
  EXPECT_THAT(bad.err, HasSubstr(path("none")));
  for (const char* word : {"none", "auto"}) {
    EXPECT_THAT(lockstep_command({"sample", "--checkpoint", word}).err, HasSubstr(word));
  }
}

// Ids that the tokenizer does not have are not drawn.
TEST_F(Train, SampleOfAPaddedVocabulary) {
  ASSERT_EQ(run({"--train.steps", "3", "--model.vocab", "4000"}).code, 0);
  const Result result =
      lockstep_command({"sample", "--train.threads", "1", "--checkpoint", path("checkpoints"),
                        "--prompt", "x", "--tokens", "20", "--top-k", "0"});
  EXPECT_EQ(result.code, 0) << result.err;
}

}  // namespace
}  // namespace lockstep::test
