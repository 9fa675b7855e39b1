// SPDX-License-Identifier: Apache-2.0
// `lockstep sample` and `lockstep eval` with a model that was trained here, in several layouts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <csignal>
#include <filesystem>
#include <sstream>

#include "tests/train/train_command.h"

namespace lockstep::test {
namespace {

namespace fs = std::filesystem;

class Infer : public Train {
 protected:
  // Trained until it has learned something: its tokens are far apart. Once, for all tests.
  void SetUp() override {
    static const TempDir folder;
    static const Result trained = [this] {
      const std::string text = folder.path() + "/text.txt";
      write_file(text, some_text());
      return run({"--train.steps", "40", "--checkpoint.dir", "auto", "--run.dir",
                  folder.path() + "/run", "--data.validation", "0.2", "--data.path", text});
    }();
    ASSERT_EQ(trained.code, 0) << trained.err;
    fs::create_directory_symlink(folder.path() + "/run", path("run"));
  }
  Result sample(const Words& options) const {
    return lockstep_command(Words{"sample", "--checkpoint", path("run"), "--train.threads", "1"} +
                            options);
  }
  static std::vector<json> lines(const Result& result) {
    EXPECT_EQ(result.code, 0) << result.err;
    std::vector<json> all;
    std::istringstream out(result.out);
    for (std::string line; std::getline(out, line);) all.push_back(json::parse(line));
    return all;
  }
  Words eval(const Words& options) const {
    return Words{"eval", "--checkpoint", path("run"), "--train.threads", "1", "--json"} + options;
  }
};

const std::vector<Words> kLayouts{{"-n", "2", "--parallel.tp", "2"},
                                  {"-n", "2", "--parallel.pp", "2"},
                                  {"-n", "2", "--parallel.shard", "full"},
                                  {"-n", "2"},
                                  {"--offload.params", "true", "--offload.device_limit", "64MB"}};

TEST_F(Infer, EveryLayoutWritesAndMeasuresTheSame) {
  const Words options{"--prompt", "int ", "--prompt", "for",     "--samples", "2",
                      "--tokens", "24",   "--json",   "--top-p", "0.9"};
  const auto expected = lines(sample(options));
  ASSERT_EQ(expected.size(), 5U);
  EXPECT_EQ(expected[2]["prompt"], 1);
  EXPECT_EQ(expected[2]["token_ids"].size(), 24U);
  EXPECT_EQ(expected[2]["finish"], "length");
  EXPECT_NE(expected[2]["text"], expected[3]["text"]);
  EXPECT_GT(expected[4]["tokens_per_s"].get<double>(), 0);
  EXPECT_GT(expected[4]["ttft_ms"].get<double>(), 0);
  const json measured = lines(lockstep_command(eval({})))[0];
  for (const Words& layout : kLayouts) {
    if (!tests_all() && (layout == kLayouts[0] || layout == kLayouts[3])) continue;
    const auto found = lines(sample(options + layout));
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < 4; ++i) EXPECT_EQ(found[i], expected[i]) << layout.back();
    if (!tests_all() && layout == kLayouts[4]) continue;
    const json again = lines(lockstep_command(eval(layout)))[0];
    EXPECT_NEAR(again["loss"], measured["loss"], 1e-6) << layout.back();
    EXPECT_EQ(again["tokens"], measured["tokens"]);
  }
  // One text for two data-parallel ranks, and three.
  for (const std::string count : {"1", "3"}) {
    const Words uneven{"--prompt", "int ", "--samples", count, "--tokens", "6", "--json"};
    const auto alone = lines(sample(uneven)), shared = lines(sample(uneven + Words{"-n", "2"}));
    ASSERT_EQ(shared.size(), alone.size());
    for (size_t i = 0; i + 1 < alone.size(); ++i) EXPECT_EQ(shared[i], alone[i]) << count;
  }
  // The trainer has measured it, too.
  const std::string log = read_file(path("run/log.txt"));
  const size_t place = log.rfind("validation loss ");
  EXPECT_NEAR(std::stod(log.substr(place + 16)), measured["loss"], 5e-5);
  // Bytes are tokens.
  EXPECT_NEAR(measured["bits_per_byte"], measured["loss"].get<double>() / std::log(2), 1e-9);
  EXPECT_NEAR(measured["perplexity"], std::exp(measured["loss"].get<double>()), 1e-9);
}

TEST_F(Infer, ParametersStayGatheredWhereTheyFit) {
  const Words options{"--prompt", "int ", "--samples", "3", "--tokens", "12", "--json"};
  const auto expected = lines(sample(options));
  const Words shard{"-n", "2", "--parallel.shard", "full"};
  const Words offload = shard + Words{"--offload.params", "true"};
  struct Case {
    Words layout;
    std::string says;
    bool sampled = false;
  };
  for (const auto& [layout, way, sampled] :
       {Case{shard, "held", true},
        Case{shard + Words{"--memory.max_per_device", "240KB"}, "streamed"},
        Case{offload + Words{"--offload.device_limit", "64MB"}, "held"}, Case{offload, "streamed"},
        // Less than the model has, and no gradients.
        Case{{"--offload.params", "true", "--offload.device_limit", "120KB"}, "streamed", true}}) {
    if (!sampled && !tests_all()) continue;
    const Result result = lockstep_command(
        Words{"sample", "--train.threads", "1", "--checkpoint", path("run")} + options + layout,
        {"LOCKSTEP_LOG=debug"});
    EXPECT_THAT(result.err, testing::HasSubstr(way)) << layout.back();
    const auto found = lines(result);
    ASSERT_EQ(found.size(), expected.size()) << layout.back();
    for (size_t i = 0; i < 3; ++i) EXPECT_EQ(found[i], expected[i]) << layout.back();
  }
}

// SIGKILL of one rank, while text comes out.
TEST_F(Infer, ALostRankEndsTheJob) {
  fs::create_directory(path("tmp"));
  for (const Words& layout : {Words{"--parallel.tp", "2"}, Words{"--parallel.pp", "2"}}) {
    for (const int lost : {0, 1}) {
      if (!tests_all() && (lost == 0) != (layout[0] == "--parallel.tp")) continue;
      Subprocess job(Words{LOCKSTEP_COMMAND, "sample", "--checkpoint", path("run"), "-n", "2",
                           "--tokens", "1000000000", "--ignore-eos"} +
                         layout,
                     {"TMPDIR=" + path("tmp")});
      constexpr milliseconds kLoaded{60'000};
      ASSERT_TRUE(eventually([&] { return job.out().size() > 50; }, kLoaded)) << job.err();
      const auto ranks = job.others();
      for (const pid_t pid : ranks) {
        const std::string name = read_file("/proc/" + std::to_string(pid) + "/comm");
        if (name == "lockstep-r" + std::to_string(lost) + "\n") ::kill(pid, SIGKILL);
      }
      const Result result = job.wait();
      EXPECT_EQ(result.code, 128 + SIGKILL);
      EXPECT_THAT(result.last_line(), says("rank " + std::to_string(lost) + " ... SIGKILL"));
      EXPECT_TRUE(eventually([&] { return job.others().empty(); }));
      EXPECT_TRUE(fs::is_empty(path("tmp")));
      for (const auto& entry : fs::directory_iterator("/dev/shm")) {
        for (const pid_t pid : ranks)
          EXPECT_EQ(entry.path().string().find(std::to_string(pid)), std::string::npos);
      }
    }
  }
}

TEST_F(Infer, TextsEndAtStopTextsAndPromptsAreRead) {
  const json whole = lines(sample({"--prompt", "int ", "--tokens", "30", "--json"}))[0];
  const std::string text = whole["text"];
  ASSERT_GE(text.size(), 10U);
  const std::string stop = text.substr(6, 2);
  const json cut = lines(sample(
      {"--prompt", "int ", "--tokens", "30", "--json", "--stop", stop, "--logprobs", "2"}))[0];
  EXPECT_EQ(cut["finish"], "stop");
  EXPECT_EQ(cut["text"], text.substr(0, text.find(stop)));
  ASSERT_EQ(cut["logprobs"].size(), cut["token_ids"].size());
  const json& first = cut["logprobs"][0];
  EXPECT_LE(first["logprob"], first["top"][0]["logprob"]);
  EXPECT_EQ(first["top"].size(), 2U);
  // What is printed to people is the prompt and the same text.
  EXPECT_EQ(sample({"--prompt", "int ", "--tokens", "30"}).out, "int " + text + "\n");

  // The same model as a Hugging Face folder, and imported from it.
  ASSERT_EQ(lockstep_command({"checkpoint", "export", path("run"), path("hf")}).code, 0);
  ASSERT_EQ(lockstep_command({"checkpoint", "import", path("hf"), path("back")}).code, 0);
  const Words again{"--prompt", "int ", "--tokens", "30", "--json"};
  EXPECT_EQ(lines(lockstep_command(Words{"sample", "--train.threads", "1", "--checkpoint",
                                         path("hf"), "--tokenizer", "bytes"} +
                                   again))[0],
            whole);
  EXPECT_EQ(lines(lockstep_command(
                Words{"sample", "--train.threads", "1", "--checkpoint", path("back")} + again))[0],
            whole);

  // Prompts of a file, in their order.
  write_file(path("prompts.jsonl"), "{\"prompt\": \"int \"}\n\n{\"prompt\": \"for\"}\n");
  const Words brief{"--tokens", "8", "--json", "--temperature", "0"};
  const auto from_file = lines(sample(brief + Words{"--prompt-file", path("prompts.jsonl")}));
  const auto given = lines(sample(brief + Words{"--prompt", "int ", "--prompt", "for"}));
  ASSERT_EQ(from_file.size(), 3U);
  EXPECT_EQ(from_file[0], given[0]);
  EXPECT_EQ(from_file[1], given[1]);
  write_file(path("plain.txt"), "for");
  EXPECT_EQ(lines(sample(brief + Words{"--prompt-file", path("plain.txt")}))[0]["text"],
            given[1]["text"]);
}

TEST_F(Infer, MeasuresTextAndContinuations) {
  write_file(path("other.txt"), std::string("int main() { return 0; }\n") + std::string(60, 'x'));
  const auto measure = [&](const Words& options) {
    return lines(lockstep_command(eval(Words{"--data.path", path("other.txt")} + options)))[0];
  };
  EXPECT_EQ(measure({})["tokens"], 84);
  // Windows that do not overlap have no context for their first token.
  const json coarse = measure({"--seq-len", "16", "--stride", "16"});
  EXPECT_EQ(coarse["tokens"], 84 - 5);
  const json fine = measure({"--seq-len", "16", "--stride", "1"});
  EXPECT_EQ(fine["tokens"], 84);
  EXPECT_LT(fine["loss"], coarse["loss"]);
  // The likelihood of a text is the sum over its tokens, however it is cut.
  write_file(path("requests.jsonl"),
             "{\"context\": \"int\", \"continuation\": \" main() {\"}\n"
             "{\"context\": \"int \", \"continuation\": \"main\"}\n"
             "{\"context\": \"int main\", \"continuation\": \"() {\"}\n");
  for (const Words& layout : std::vector<Words>{{}, kLayouts[1]}) {
    const auto scores =
        lines(lockstep_command(Words{"eval", "--train.threads", "1", "--checkpoint", path("run"),
                                     "--requests", path("requests.jsonl")} +
                               layout));
    ASSERT_EQ(scores.size(), 3U);
    EXPECT_EQ(scores[0]["tokens"], 9);
    EXPECT_EQ(scores[1]["tokens"], 5);  // with the space
    EXPECT_NEAR(scores[0]["loglikelihood"],
                scores[1]["loglikelihood"].get<double>() + scores[2]["loglikelihood"].get<double>(),
                1e-4);
  }

  // What has no answer.
  const auto refused = [&](const Words& words, const std::string& facts) {
    const Result result = lockstep_command(words);
    EXPECT_EQ(result.code, 2) << words.back();
    EXPECT_THAT(result.err, says(facts)) << words.back();
    EXPECT_EQ(result.out, "");
  };
  const Words sampled{"sample", "--checkpoint", path("run")};
  refused(sampled + Words{"--prompt", std::string(64, 'x')}, "64 tokens ... 32 positions");
  refused(sampled + Words{"--prompt", ""}, "--prompt ... empty");
  refused(sampled + Words{"--top-p", "0"}, "--top-p ... 0");
  refused(sampled + Words{"--logprobs", "2"}, "--logprobs ... --json");
  refused(sampled + Words{"-n", "0"}, "-n ... 0");
  refused(sampled + Words{"-n", "2", "--parallel.tp", "3"}, "2 ... 3");
  refused(sampled + Words{"--parallel.tq", "3"}, "parallel.tq ... parallel.tp");
  refused(sampled + Words{"--prompt-file", path("none")}, path("none"));
  refused({"sample", "--checkpoint", path("none")}, path("none"));
  refused(eval({"--stride", "4"}), "--stride ... --data.path");
  refused(eval({"--data.path", path("none")}), path("none"));
  refused(eval({"--data.path", path("text.txt"), "--seq-len", "64"}), "64 ... 32 positions");
  write_file(path("wrong.jsonl"), "{\"context\": \"a\"}\n");
  refused(eval({"--requests", path("wrong.jsonl")}), "wrong.jsonl:1 ... continuation");
  fs::create_directory(path("hf"));
  write_file(path("hf/config.json"), read_file(path("wrong.jsonl")));
  EXPECT_EQ(lockstep_command({"sample", "--checkpoint", path("hf")}).code, 2);
}

}  // namespace
}  // namespace lockstep::test
