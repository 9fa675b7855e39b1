// SPDX-License-Identifier: Apache-2.0
// Fine-tuning: the loss on answers, frozen parameters, validation before the first step, and the
// checkpoint with the lowest validation loss.
#include <gmock/gmock.h>

#include <cmath>
#include <filesystem>
#include <map>
#include <set>
#include <sstream>

#include "lockstep/comm/group.h"
#include "lockstep/core/error.h"
#include "lockstep/formats/checkpoint_folder.h"
#include "lockstep/formats/checkpoint_reader.h"
#include "lockstep/formats/dtype_names.h"
#include "lockstep/train/checkpoints/best_checkpoint.h"
#include "tests/data/tokenizer/small_tokenizer.h"
#include "tests/train/train_command.h"

namespace lockstep::test {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

// Prompts and answers of many lengths.
std::string some_examples(int first, int count) {
  std::string text;
  for (int i = first; i < first + count; ++i) {
    text += "{\"prompt\": \"" + std::to_string(i * i * 31) + " to words: \", \"completion\": \"" +
            std::string(static_cast<size_t>(1 + i * 5 % 9), static_cast<char>('a' + i % 7)) +
            "\"}\n";
  }
  return text;
}

class Tune : public Train {
 protected:
  Tune() {
    write_file(path("tune.jsonl"), some_examples(0, 24));
    write_file(path("held.jsonl"), some_examples(24, 5));
  }

  // Short runs, at one rate.
  Words briefly(const Words& options) const {
    return Words{"--optim.warmup", "0", "--optim.schedule", "constant"} + options;
  }
  Words tune(const Words& options) const {
    return briefly(
        Words{"--data.path", path("tune.jsonl"), "--data.validation", path("held.jsonl")} +
        options);
  }
  std::map<int64_t, double> validations(const std::string& name) const {
    std::map<int64_t, double> found;
    std::istringstream text(read_file(path(name + ".jsonl")));
    for (std::string line; std::getline(text, line);) {
      const json object = json::parse(line);
      if (!object.contains("validation_loss")) continue;
      EXPECT_FALSE(found.contains(object["step"])) << line;
      found[object["step"]] = object["validation_loss"];
    }
    return found;
  }
  // The bytes of every tensor of a checkpoint, by name.
  std::map<std::string, std::string> tensors(const std::string& checkpoint) const {
    formats::CheckpointReader reader(path(checkpoint));
    std::map<std::string, std::string> found;
    for (const auto& [name, record] : reader.manifest().tensors) {
      std::string bytes(static_cast<size_t>(formats::byte_size(record.dtype, record.shape).value()),
                        '\0');
      reader.read(name, layout::Box::whole(record.shape), std::as_writable_bytes(std::span(bytes)));
      found[name] = std::move(bytes);
    }
    return found;
  }
  // The folder of the step after the first with the lowest validation loss.
  std::string lowest(const std::string& name) const {
    std::pair<double, int64_t> least{HUGE_VAL, 0};
    for (const auto& [step, loss] : validations(name)) {
      if (step > 0) least = std::min(least, {loss, step});
    }
    return formats::step_folder_name(least.second);
  }
  std::string best(const std::string& name) const {
    return fs::read_symlink(path(name + "/best")).string();
  }
};

TEST_F(Tune, LossOnAnswersIsThatOfThePlainStatement) {
  write_small_tokenizer(path("tokenizer.json"), 256);
  // Rows of 20 cut some of the answers.
  const Words options =
      tune({"--data.tokenizer", path("tokenizer.json"), "--train.seq_len", "20",
            "--train.micro_batch", "24", "--train.global_batch", "24", "--train.threads", "1"});
  steps("first", options + Words{"--train.steps", "3", "--optim.lr", "0.1"});
  const Result exported = lockstep_command({"checkpoint", "export", path("first"), path("hf")});
  ASSERT_EQ(exported.code, 0) << exported.err;
  const auto found = steps("second", options + Words{"--train.steps", "1", "--model.path",
                                                     path("hf"), "--train.eval_tokens", "0"});
  Subprocess python({LOCKSTEP_PYTHON_WITH_TORCH, LOCKSTEP_SOURCE_DIR "/tests/train/answer_loss.py",
                     path("hf"), "20", "256", path("tune.jsonl"), path("held.jsonl")},
                    {"OMP_NUM_THREADS=1"});
  const Result plain = python.wait(milliseconds{120'000});
  ASSERT_EQ(plain.code, 0) << plain.err;
  double on_tune = 0, on_held = 0;
  std::istringstream(plain.out) >> on_tune >> on_held;
  ASSERT_EQ(found.size(), 1U);
  EXPECT_NEAR(found[0]["loss"].get<double>(), on_tune, 2e-6 * on_tune);
  const auto held = validations("second");
  ASSERT_TRUE(held.contains(0));  // model.path has weights, so they are measured first
  EXPECT_NEAR(held.at(0), on_held, 2e-6 * on_held);
  EXPECT_GT(std::abs(on_tune - on_held), 1e-3);  // or they say nothing
}

TEST_F(Tune, LayoutsHaveTheLossesOfOneProcess) {
  const Words options = tune({"--train.steps", "4", "--optim.clip", "0.5"});
  const auto one = steps("one", options);
  ASSERT_EQ(one.size(), 4U);
  const auto held = validations("one");
  const auto follows = [&](const std::string& name, const Words& layout) {
    expect_follows(name, options + layout, one);
    EXPECT_NEAR(validations(name).at(4), held.at(4), 1e-5 * held.at(4)) << name;
  };
  follows("dp", {"-n", "2"});
  follows("rows", {"--train.micro_batch", "8"});
  follows("shard", {"-n", "4", "--parallel.shard", "full", "--train.micro_batch", "1"});
  follows("tp", {"-n", "2", "--parallel.tp", "2"});
  follows("pp", {"-n", "4", "--parallel.pp", "2"});
  const Words exact{"--train.reproducible", "true"};
  EXPECT_EQ(losses(steps("exact", options + exact)),
            losses(steps("exact2", options + exact + Words{"-n", "2"})));
}

TEST_F(Tune, ResumedExamplesGoOnWhereTheyWere) {
  const Words options = tune({"--train.threads", "1"});
  const auto whole = losses(steps("whole", options + Words{"--train.steps", "6"}));
  steps("half", options + Words{"--train.steps", "3"});
  const Words more = options + Words{"--train.steps", "6", "--checkpoint.resume", "auto"};
  EXPECT_EQ(losses(steps("half", more)), whole);
  // The same tokens with another border between prompt and answer are other data.
  std::string text = some_examples(0, 24);
  const std::string border = " \", \"completion\": \"";
  text.replace(text.find(border), border.size(), "\", \"completion\": \" ");
  write_file(path("tune.jsonl"), text);
  EXPECT_THAT(
      [&] {
        steps_or_throw("half", more + Words{"--train.steps", "8"});
      },
      ThrowsMessage<ConfigError>(HasSubstr("checkpoint.other_data")));
}

TEST_F(Tune, FrozenParametersKeepTheirBits) {
  const Words options{
      "--train.steps",     "4", "--checkpoint.every", "1",
      "--checkpoint.keep", "0", "--train.freeze",     "embed.*, blocks.0.*,*.mlp.up.weight"};
  const auto frozen = [](const std::string& name) {
    return name.starts_with("embed.") || name.starts_with("blocks.0.") ||
           name.ends_with(".mlp.up.weight");
  };
  const auto one = steps("one", options);
  const auto check = [&](const std::string& name) {
    SCOPED_TRACE(name);
    const auto before = tensors(name + "/step-00000001"), after = tensors(name + "/step-00000004");
    ASSERT_EQ(before.size(), after.size());
    int with_state = 0;
    for (const auto& [tensor, bytes] : before) {
      if (!tensor.starts_with("optim.")) {
        EXPECT_EQ(bytes == after.at(tensor), frozen(tensor)) << tensor;
        continue;
      }
      EXPECT_FALSE(frozen(tensor.substr(6, tensor.rfind('.') - 6))) << tensor;
      ++with_state;
    }
    EXPECT_GT(with_state, 0);
  };
  check("one");
  const auto follows = [&](const std::string& name, const Words& layout) {
    expect_follows(name, options + layout, one);
    check(name);
  };
  follows("full", {"-n", "2", "--parallel.shard", "full", "--train.recompute", "selective"});
  follows("tp", {"-n", "2", "--parallel.tp", "2", "--parallel.sequence_parallel", "true"});
  follows("pp_shard", {"-n", "4", "--parallel.pp", "2", "--parallel.shard", "full"});
  follows("offload",
          {"-n", "2", "--parallel.shard", "full", "--offload.params", "true", "--offload.optimizer",
           "true", "--offload.strategy", "extreme", "--offload.param_budget", "64KB"});
  if (!tests_all()) return;
  follows("dp", {"-n", "2"});
  follows("optimizer", {"-n", "2", "--parallel.shard", "optimizer"});
  follows("grad_op", {"-n", "2", "--parallel.shard", "grad_op", "--train.recompute", "full"});
  follows("hybrid", {"-n", "4", "--parallel.shard", "hybrid", "--parallel.shard_size", "2"});
  follows("tensors",
          {"-n", "2", "--parallel.shard", "full", "--parallel.shard_granularity", "tensors"});
  follows("pp", {"-n", "2", "--parallel.pp", "2"});
  follows("zb", {"-n", "2", "--parallel.pp", "2", "--parallel.schedule", "zb-h1"});
  follows("offload_whole",
          {"-n", "2", "--offload.params", "true", "--offload.grads", "true", "--offload.optimizer",
           "true", "--offload.strategy", "extreme", "--offload.param_budget", "64KB"});
}

// Stages and ranks on which nothing is trained.
TEST_F(Tune, WholeStagesMayBeFrozen) {
  int number = 0;
  for (const std::string freeze :
       {"embed.*,positions.*,blocks.0.*", "embed.*,norm.*,blocks.1.*,head.*"}) {
    const Words options{"--train.steps", "3", "--train.freeze", freeze, "--model.tied", "false"};
    const std::string each = std::to_string(number++);
    const auto one = steps("one" + each, options);
    const Words pipeline = options + Words{"--parallel.pp", "2"};
    expect_follows("shard" + each, pipeline + Words{"-n", "4", "--parallel.shard", "full"}, one);
    expect_follows(
        "offload" + each,
        pipeline + Words{"-n", "2", "--offload.params", "true", "--offload.optimizer", "true",
                         "--offload.strategy", "extreme", "--offload.param_budget", "80kB"},
        one);
    expect_follows("pp" + each, pipeline + Words{"-n", "4"}, one);
  }
}

// A frozen table that two stages have is loaded in both.
TEST_F(Tune, ATiedFrozenTableComesFromTheCheckpoint) {
  steps("before", {"--train.steps", "5", "--train.seed", "7"});
  const Words options{"--train.steps",     "3",     "--checkpoint.resume", path("before"),
                      "--checkpoint.load", "model", "--train.freeze",      "embed.*"};
  const auto one = steps("one", options);
  expect_follows("pp_shard",
                 options + Words{"-n", "4", "--parallel.pp", "2", "--parallel.shard", "full"}, one);
  if (!tests_all()) return;
  expect_follows("pp", options + Words{"-n", "2", "--parallel.pp", "2"}, one);
  expect_follows("pp_tensors",
                 options + Words{"-n", "4", "--parallel.pp", "2", "--parallel.shard", "optimizer",
                                 "--parallel.shard_granularity", "tensors"},
                 one);
}

TEST_F(Tune, ParametersMayBeFrozenLaterButNotThawed) {
  const Words freeze{"--train.freeze", "blocks.0.*"};
  const Words more{"--checkpoint.resume", "auto", "--train.steps", "4"};
  steps("run", briefly({"--train.steps", "2"}));
  steps("run", briefly(more + freeze));
  const auto before = tensors("run/step-00000002"), after = tensors("run/step-00000004");
  EXPECT_EQ(before.at("blocks.0.mlp.up.weight"), after.at("blocks.0.mlp.up.weight"));
  EXPECT_NE(before.at("blocks.1.mlp.up.weight"), after.at("blocks.1.mlp.up.weight"));
  EXPECT_TRUE(before.contains("optim.blocks.0.mlp.up.weight.exp_avg"));
  EXPECT_FALSE(after.contains("optim.blocks.0.mlp.up.weight.exp_avg"));
  const Words further = briefly({"--checkpoint.resume", "auto", "--train.steps", "6"});
  EXPECT_THAT([&] { steps_or_throw("run", further); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("blocks.0."), HasSubstr("train.freeze"),
                                               HasSubstr("checkpoint.load model"))));
  steps("run", further + Words{"--checkpoint.partial", "true"});
  const auto thawed = tensors("run/step-00000006");
  EXPECT_NE(thawed.at("blocks.0.mlp.up.weight"), after.at("blocks.0.mlp.up.weight"));
  EXPECT_TRUE(thawed.contains("optim.blocks.0.mlp.up.weight.exp_avg"));
}

TEST_F(Tune, TheLowestValidationLossStays) {
  // Answers that become less likely with every step.
  write_file(path("held.jsonl"), "{\"prompt\": \"961 to words: \", \"completion\": \"ZZZ\"}\n");
  const Words options =
      tune({"--checkpoint.best", "true", "--checkpoint.keep", "1", "--train.eval_every", "2",
            "--train.eval_first", "true", "--model.layers", "1"});
  const auto checkpoints = [&](const std::string& name) {
    std::set<std::string> found;
    for (const auto& entry : fs::directory_iterator(path(name)))
      found.insert(entry.path().filename());
    return found;
  };
  steps("run", options + Words{"--train.steps", "5", "-n", "2"});
  const std::string winner = lowest("run");
  EXPECT_LT(winner, "step-00000005");  // or the newest is the best, and nothing was kept
  EXPECT_EQ(best("run"), winner);
  EXPECT_EQ(checkpoints("run"), (std::set<std::string>{"best", winner, "step-00000005"}));
  // Moved, it is still right, and commands take it by its name.
  fs::rename(path("run"), path("moved"));
  const Result inspect = lockstep_command({"checkpoint", "inspect", path("moved/best")});
  EXPECT_THAT(inspect.out, HasSubstr("step       " + std::to_string(std::stoi(winner.substr(5)))));
  fs::rename(path("moved"), path("run"));
  // The best so far outlives the run that found it, also one that ended before it made the link.
  fs::remove(path("run/best"));
  const Words more{"--checkpoint.resume", "auto", "--train.steps", "8"};
  steps("run", options + more);
  EXPECT_EQ(best("run"), winner);
  EXPECT_EQ(lowest("run"), winner);
  EXPECT_EQ(checkpoints("run"), (std::set<std::string>{"best", winner, "step-00000008"}));
  EXPECT_EQ(validations("run").count(0), 1U);
  // Losses on other data are not compared with it.
  write_file(path("other.jsonl"), some_examples(60, 6));
  steps("run", options + Words{"--train.steps", "10", "--checkpoint.resume", "auto",
                               "--data.validation", path("other.jsonl")});
  EXPECT_EQ(best("run"), "step-00000010");
}

TEST_F(Tune, ABestCheckpointThatCannotBeSavedIsNotTheBest) {
  const Words options =
      tune({"--checkpoint.best", "true", "--train.eval_every", "1", "--optim.lr", "0.001"});
  steps("checkpoints", options + Words{"--train.steps", "2"});
  EXPECT_EQ(best("checkpoints"), "step-00000002");  // these get better
  Subprocess process(Words{"sh", "-c", "ulimit -f 200; exec \"$@\"", "sh", LOCKSTEP_COMMAND} +
                     command(options + Words{"--train.steps", "4", "--checkpoint.resume", "auto"}));
  const Result result = process.wait(milliseconds{60'000});
  EXPECT_EQ(result.code, 1) << result.err;
  EXPECT_EQ(best("checkpoints"), "step-00000002");
  EXPECT_TRUE(fs::exists(path("checkpoints/best/manifest.json")));
}

TEST(BestCheckpoint, IsTheLowestThatWasSaved) {
  train::BestCheckpoint best({.dir = "none", .best = true}, "text", {});
  EXPECT_FALSE(best.offer(1, std::nan("")));
  EXPECT_EQ(best.step(), std::nullopt);
  EXPECT_TRUE(best.offer(2, 5));
  EXPECT_FALSE(best.offer(3, 5));
  EXPECT_TRUE(best.offer(4, 4));
  best.not_saved(3);
  EXPECT_EQ(best.step(), 4);
  best.not_saved(4);
  EXPECT_EQ(best.step(), 2);
  EXPECT_TRUE(best.offer(5, 4.5));
  std::map<std::string, std::string> state;
  best.add_to(state);
  EXPECT_EQ(json::parse(state.at("best"))["step"], 5);
  EXPECT_EQ(json::parse(state.at("best"))["loss"], 4.5);
  // A run that continues from copies in memory may still have to save it.
  train::BestCheckpoint copied({.dir = "none", .best = true}, "text", {});
  copied.restore(state, 5);
  EXPECT_EQ(copied.step(), 5);
  train::BestCheckpoint later({.dir = "none", .best = true}, "text", {});
  later.restore(state, 6);
  EXPECT_EQ(later.step(), std::nullopt);
  train::BestCheckpoint other({.dir = "none", .best = false}, "text", {});
  EXPECT_FALSE(other.offer(1, 1));
}

// A save that failed may be known to rank 0 alone: all ranks continue with what its text says.
TEST(BestCheckpoint, RankZerosTextCounts) {
  using State = std::map<std::string, std::string>;
  const auto with = [](int step) {
    return State{{"best", json{{"step", step}, {"loss", 4}, {"measure", "text"}}.dump()}};
  };
  const auto restored = [](const State& state, const comm::Group& group) {
    train::BestCheckpoint best({.dir = "none", .best = true}, "text", group);
    best.restore(state, 5);
    return best.step();
  };
  comm::run_threads(2, [&](const comm::Group& group) {
    const bool leads = group.rank() == 0;
    EXPECT_EQ(restored(with(leads ? 5 : 6), group), 5);
    EXPECT_EQ(restored(leads ? State() : with(5), group), std::nullopt);
  });
}

TEST_F(Tune, SaysWhatIsWrong) {
  const auto refused = [&](const Words& options, const std::string& a, const std::string& b = "") {
    EXPECT_THAT([&] { steps_or_throw("refused", options); },
                ThrowsMessage<ConfigError>(AllOf(HasSubstr(a), HasSubstr(b))));
  };
  refused({"--train.freeze", "blocks.0.mlp.upp.weight"}, "blocks.0.mlp.upp.weight",
          "blocks.0.mlp.up.weight");
  refused({"--train.freeze", "embed.*,*"}, "train.freeze", "28");
  refused({"--checkpoint.best", "true"}, "checkpoint.best", "train.eval_every");
  refused({"--checkpoint.best", "true", "--train.eval_every", "1", "--checkpoint.dir", ""},
          "checkpoint.best", "checkpoint.dir");
  refused(tune({"--train.seq_len", "4"}), "train.seq_len 4", "24 examples");
  refused(
      {"--data.path", path("tune.jsonl"), "--data.validation", "0.02", "--train.eval_every", "1"},
      "data.validation 0.02", "24");
  write_file(path("raw.jsonl"), "{\"content\": \"text\"}\n");
  expect_refused({"--data.path", path("raw.jsonl")}, path("raw.jsonl") + ":1: ");
  // What is cut is said, once.
  const Result cut = run(tune({"-n", "2", "--train.seq_len", "17", "--train.steps", "1"}));
  EXPECT_EQ(cut.code, 0) << cut.err;
  EXPECT_THAT(cut.err, HasSubstr("of 29 examples"));
  // And that bytes have no end of text.
  EXPECT_THAT(cut.err, says("tokenizer bytes ... end-of-text"));
  EXPECT_EQ(std::count(cut.err.begin(), cut.err.end(), '\n'), 2) << cut.err;
}

// A folder with two tokens that could end a text, and one that does.
TEST_F(Tune, AModelEndsItsTextAsItsFilesSay) {
  fs::create_directory(path("base"));
  write_small_tokenizer(path("base/tokenizer.json"), 257);
  std::string tokenizer = read_file(path("base/tokenizer.json"));
  const std::string unused = "unused256", end = "<|im_end|>";
  write_file(path("base/tokenizer.json"),
             tokenizer.replace(tokenizer.find(unused), unused.size(), end));
  const Words brief{"--data.tokenizer", path("base/tokenizer.json")};
  steps("weights", brief + Words{"--train.steps", "1", "--optim.warmup", "0"});
  ASSERT_EQ(lockstep_command({"checkpoint", "export", path("weights"), path("hf")}).code, 0);
  json config = json::parse(read_file(path("hf/config.json")));
  EXPECT_EQ(config["eos_token_id"], 257);
  config["eos_token_id"] = {256, 257};
  write_file(path("hf/config.json"), config.dump());
  write_file(path("hf/generation_config.json"), R"({"eos_token_id": [256, 257]})");

  write_file(path("one.jsonl"), "{\"prompt\": \"2+2=\", \"completion\": \"4.\"}\n");
  const Result tuned = run(briefly({"--model.path", path("hf"), "--data.path", path("one.jsonl"),
                                    "--train.steps", "40", "--run.dir", path("tuned"),
                                    "--checkpoint.dir", "auto", "--train.global_batch", "2"}));
  ASSERT_EQ(tuned.code, 0) << tuned.err;
  EXPECT_THAT(tuned.out, AllOf(HasSubstr("1 example in 1 file"), HasSubstr(" 7 tokens; "),
                               HasSubstr(end + " (256)\n")));
  // One example is too few to hold one out.
  EXPECT_THAT(tuned.err, says("data.validation 0.05 ... 1 example"));
  EXPECT_EQ(std::count(tuned.err.begin(), tuned.err.end(), '\n'), 1) << tuned.err;

  fs::remove_all(path("base"));
  fs::rename(path("hf"), path("elsewhere"));
  const Words sample{"sample",      "--train.threads", "1",    "--checkpoint",
                     path("tuned"), "--prompt",        "2+2=", "--tokens",
                     "20",          "--temperature",   "0"};
  const Result said = lockstep_command(sample);
  EXPECT_EQ(said.out, "2+2=4.\n") << said.err;
  const Result exported = lockstep_command({"checkpoint", "export", path("tuned"), path("out")});
  EXPECT_EQ(exported.code, 0) << exported.err;
  EXPECT_EQ(json::parse(read_file(path("out/config.json")))["eos_token_id"], json({256, 257}));
  EXPECT_TRUE(json::parse(read_file(path("out/config.json")))["bos_token_id"].is_null());
  EXPECT_EQ(read_file(path("out/generation_config.json")),
            read_file(path("elsewhere/generation_config.json")));

  // Another tokenizer of the same size: with these weights, and for this model.
  write_small_tokenizer(path("other.json"), 257);
  const auto both_named =
      AllOf(HasSubstr("tokenizer.json (crc32c "), HasSubstr(path("other.json") + " (crc32c "));
  const Result other = lockstep_command(sample + Words{"--tokenizer", path("other.json")});
  EXPECT_EQ(other.code, 0);
  EXPECT_THAT(other.err, both_named);
  const Result loaded =
      run({"--checkpoint.resume", path("tuned"), "--checkpoint.load", "model", "--train.steps", "1",
           "--optim.warmup", "0", "--data.tokenizer", path("other.json")});
  EXPECT_EQ(loaded.code, 0) << loaded.err;
  EXPECT_THAT(loaded.err, both_named);
  EXPECT_EQ(std::count(loaded.err.begin(), loaded.err.end(), '\n'), 1) << loaded.err;
}

}  // namespace
}  // namespace lockstep::test
