// SPDX-License-Identifier: Apache-2.0
// `lockstep checkpoint inspect`, `verify` and `diff`, as their users meet them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/cli/checkpoint/models.h"
#include "tests/support/says.h"
#include "tests/support/subprocess.h"

namespace lockstep::test {
namespace {

using config::ModelKind;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Words = std::vector<std::string>;
namespace fs = std::filesystem;

class CheckpointCommand : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return dir_.path() + "/" + name; }

  static Result run(Words words) {
    words.insert(words.begin(), "checkpoint");
    return lockstep_command(words);
  }

  std::string save(const std::string& name, const Values& values, const SaveOptions& options = {}) {
    return save_model(path(name), config_, values, options);
  }

  TempDir dir_;
  const config::TrainConfig config_ = small_config(ModelKind::gpt);
  const Values values_ = model_values(config_.model);
};

void flip_bit(const std::string& file) {
  std::string bytes = read_file(file);
  bytes[bytes.size() - 5] = static_cast<char>(bytes[bytes.size() - 5] ^ 4);
  write_file(file, bytes);
}

TEST_F(CheckpointCommand, InspectShowsWhatThereIs) {
  auto config = config_;
  config.model.layers = 12;
  const auto saved = save_model(path("run"), config, {}, {.ranks = 3});
  const Result result = run({"inspect", path("run")});
  ASSERT_EQ(result.code, 0) << result.err;
  // 12 blocks of 12 tensors and 532 elements, embeddings, positions and the last norm's two.
  EXPECT_THAT(
      result.out,
      AllOf(HasSubstr(saved + "  step 7  "), HasSubstr("\nstep       7\n"),
            HasSubstr("\nconfig     gpt: 12 layers, hidden 8, 4 heads, ffn 12, vocab 20"),
            HasSubstr("\nmodel      148 tensors, 6688 elements, 26.1 kB\n"),
            HasSubstr("\noptimizer  296 tensors, 6836 elements, 26.7 kB\n"),
            HasSubstr("\nlayout     3 files, 1036 slices; 148 of 444 tensors in one piece; tp 1, "
                      "pp 1, shard none\n"),
            HasSubstr("\nstate      samples 64\n"),
            HasSubstr("state      scaler {\"scale\":2.0}\n"),
            HasSubstr("\nfile       shard-00001-model-00001-of-00001.safetensors  ")));
  EXPECT_LT(result.out.find("blocks.2.norm1.weight "), result.out.find("blocks.10.norm1.weight "));
  EXPECT_LT(result.out.find("\npositions.weight "), result.out.find("\noptim."));
  const size_t at = result.out.find("\nblocks.0.attention.qkv.weight ");
  const std::string line = result.out.substr(at + 1, result.out.find('\n', at + 1) - at - 1);
  EXPECT_THAT(line, ::testing::MatchesRegex(".*  F32 +\\(24, 8\\) +768 B +3 +3"));
}

TEST_F(CheckpointCommand, InspectAsJsonHasEverything) {
  save("run", values_, {.step = 3});
  const auto saved = save("run", values_, {.ranks = 2, .dim = 1});
  const Result result = run({"inspect", "--json", path("run")});
  ASSERT_EQ(result.code, 0) << result.err;
  const auto json = nlohmann::json::parse(result.out);
  EXPECT_EQ(json["path"], saved);
  EXPECT_EQ(json["checkpoints"].size(), 2u);
  EXPECT_EQ(json["checkpoints"][0]["step"], 3);
  EXPECT_EQ(json["step"], 7);
  EXPECT_EQ(json["describe"], config_.model.describe());
  EXPECT_EQ(json["model"]["elements"], config_.model.parameters());
  EXPECT_EQ(json["optimizer"]["tensors"], 2 * values_.size());
  EXPECT_EQ(json["config"]["model"]["hidden"], 8);
  EXPECT_EQ(json["state"]["scaler"]["scale"], 2.0);
  ASSERT_EQ(json["files"].size(), 2u);
  const std::string name = json["files"][1]["name"];
  EXPECT_EQ(json["files"][1]["bytes"], fs::file_size(saved + "/" + name));
  size_t slices = 0;
  for (const auto& tensor : json["tensors"]) {
    slices += tensor["slices"].size();
    if (tensor["name"] != "embed.weight") continue;
    EXPECT_EQ(tensor["shape"], (std::vector<int64_t>{20, 8}));
    EXPECT_EQ(tensor["bytes"], 640);
    EXPECT_EQ(tensor["slices"][1]["offsets"], (std::vector<int64_t>{0, 4}));
    EXPECT_EQ(tensor["slices"][1]["shape"], (std::vector<int64_t>{20, 4}));
  }
  EXPECT_EQ(json["slices"], slices);
}

TEST_F(CheckpointCommand, ACheckpointOfAnotherProgramHasNoModelLine) {
  const auto folder = formats::begin_checkpoint(path("run"), 1);
  const std::vector<formats::ShardSlice> slices = {{"w", "I64", {2}, layout::Box::whole({2})}};
  auto writer = formats::open_shard(folder, formats::shard_file_name(1), slices);
  writer.write("w", std::vector<std::byte>(16));
  auto manifest = formats::shard_manifest(1, formats::shard_file_name(1), writer.finish(), slices);
  manifest.config = R"({"anything":[1]})";
  formats::commit_checkpoint(path("run"), manifest);
  const Result result = run({"inspect", path("run")});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, AllOf(HasSubstr("I64"), Not(HasSubstr("\nconfig "))));
  const Result exported = run({"export", path("run"), path("out")});
  EXPECT_EQ(exported.code, 1);
  EXPECT_THAT(exported.err, says("not saved ... lockstep train"));
  EXPECT_FALSE(fs::exists(path("out")));
  EXPECT_EQ(run({"diff", path("run"), path("run")}).code, 0);
}

TEST_F(CheckpointCommand, DamageIsAnError) {
  const auto first = save("run", values_, {.step = 1});
  const auto second = save("run", values_, {.step = 2, .ranks = 2});
  EXPECT_EQ(run({"verify", path("run"), "--all"}).code, 0);
  const std::string file = "/shard-00002-model-00001-of-00001.safetensors";
  flip_bit(second + file);
  Result result = run({"verify", path("run")});
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.err, HasSubstr(second + file));
  result = run({"verify", path("run"), "--all"});
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.out, AllOf(HasSubstr(first + ": sound: step 1, "), Not(HasSubstr(second))));
  EXPECT_EQ(run({"verify", first}).code, 0);
  EXPECT_EQ(run({"diff", first, second}).code, 1);
  result = run({"export", second, path("out")});
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.err, HasSubstr(second + file));
  EXPECT_EQ(std::distance(fs::directory_iterator(dir_.path()), {}), 1) << "an export is left";

  // The newest by name is the one asked about, not one that is whole.
  fs::resize_file(second + file, 100);
  for (const char* verb : {"inspect", "verify"}) {
    result = run({verb, path("run")});
    EXPECT_EQ(result.code, 1) << verb;
    EXPECT_THAT(result.err, HasSubstr("has 100 bytes, its manifest says")) << verb;
  }
  save("run", values_, {.step = 3});
  result = run({"inspect", path("run")});
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.out, AllOf(HasSubstr("damaged: "), HasSubstr("\nstep       3\n")));
}

TEST_F(CheckpointCommand, VerifySaysWhatItRead) {
  const auto saved = save("run", values_, {.ranks = 3});
  const Result result = run({"verify", path("run")});
  EXPECT_EQ(result.code, 0) << result.err;
  uintmax_t bytes = 0;
  for (const auto& entry : fs::directory_iterator(saved)) bytes += entry.file_size();
  EXPECT_THAT(result.out, ::testing::MatchesRegex(
                              ".*: sound: step 7, 84 tensors, 3 files, " + std::to_string(bytes) +
                              " bytes read in [0-9.]+ seconds, [0-9.]+ GB/s\n"));
}

TEST_F(CheckpointCommand, LayoutsOfTheSameValuesDoNotDiffer) {
  save("a", values_);
  save("b", values_, {.ranks = 3});
  auto config = config_;
  config.parallel.tp = 4;
  save_model(path("c"), config, values_, {.ranks = 4, .dim = 1, .state = {{"samples", "65"}}});
  for (const auto& [one, other] : {std::pair{"a", "b"}, {"b", "c"}, {"c", "a"}}) {
    const Result result = run({"diff", path(one), path(other)});
    EXPECT_EQ(result.code, 0) << result.out << result.err;
    EXPECT_THAT(result.out, HasSubstr("84 tensors, 2764 elements compared: all are equal\n"));
  }
  const Result result = run({"diff", path("a"), path("c")});
  EXPECT_THAT(result.out, AllOf(HasSubstr("\nconfig parallel.tp: 1 and 4\n"),
                                HasSubstr("\nstate samples: 64 and 65\n"),
                                HasSubstr("\nstate scaler.scale: 2.0 and not set\n")));
}

TEST_F(CheckpointCommand, OneElementDiffers) {
  save("a", values_, {.ranks = 2});
  Values changed = values_;
  float& element = changed.at("blocks.1.mlp.up.weight").at(77);
  const float before = element;
  element += 0.25F;
  save("b", changed, {.ranks = 3, .dim = 1});
  Result result = run({"diff", path("a"), path("b")});
  EXPECT_EQ(result.code, 1);
  const double relative = 0.25 / std::max(std::abs(before), std::abs(element));
  char text[64];
  std::snprintf(text, sizeof(text), ": 1 of 96 elements differ, by 0.25 at most, %.3g relative\n",
                relative);
  EXPECT_THAT(result.out,
              AllOf(HasSubstr("\nblocks.1.mlp.up.weight: F32 (12, 8)" + std::string(text)),
                    HasSubstr(": 1 tensor differs\n")));
  EXPECT_EQ(run({"diff", path("a"), path("b"), "--tolerance", "0.25"}).code, 0);
  EXPECT_EQ(run({"diff", path("a"), path("b"), "--tolerance", "0.2499"}).code, 1);
  // The largest counts, not the first or the last.
  auto& around = changed.at("blocks.1.mlp.up.weight");
  around.at(76) = 0;
  around.at(78) *= 1.5F;
  element = before + 100;
  save("c", changed);
  result = run({"diff", path("a"), path("c")});
  EXPECT_THAT(result.out, HasSubstr(": 3 of 96 elements differ, by 100 at most, 1 relative\n"));
}

TEST_F(CheckpointCommand, BitsDecideUnlessThereIsATolerance) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  Values a = values_, b = values_;
  const auto set = [&](const char* name, float x, float y) {
    a.at(name).at(3) = x;
    b.at(name).at(3) = y;
  };
  set("norm.bias", 0.0F, -0.0F);
  save("zero_a", a);
  save("zero_b", b);
  EXPECT_EQ(run({"diff", path("zero_a"), path("zero_b")}).code, 1);
  EXPECT_EQ(run({"diff", path("zero_a"), path("zero_b"), "--tolerance", "0"}).code, 0);
  set("norm.bias", nan, std::copysign(nan, -1.0F));
  set("norm.weight", nan, nan);
  save("nan_a", a);
  save("nan_b", b);
  Result result = run({"diff", path("nan_a"), path("nan_b")});
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.out, AllOf(HasSubstr("norm.bias: F32 (8): 1 of 8 elements differ, by 0 at "
                                          "most, 0 relative; NaN: 1 and 1\n"),
                                Not(HasSubstr("norm.weight")),
                                HasSubstr("1 tensor differs; NaN: 2 in A, 2 in B\n")));
  EXPECT_EQ(run({"diff", path("nan_a"), path("nan_b"), "--tolerance", "0"}).code, 0);
  set("norm.bias", nan, 1);
  set("norm.weight", inf, -1);
  save("odd_a", a);
  save("odd_b", b);
  result = run({"diff", path("odd_a"), path("odd_b"), "--tolerance", "1e30"});
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.out,
              AllOf(HasSubstr("norm.bias: F32 (8): 1 of 8"), HasSubstr("NaN: 1 and 0\n"),
                    HasSubstr("norm.weight: F32 (8): 1 of 8 elements differ, by inf at "
                              "most, inf relative\n")));
}

TEST_F(CheckpointCommand, StepsNamesAndShapesDiffer) {
  save("a", values_);
  save("step", values_, {.step = 8});
  Result result = run({"diff", path("a"), path("step")});
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.out, AllOf(HasSubstr("\nstep: 7 and 8\n"), HasSubstr("all are equal")));
  EXPECT_EQ(run({"diff", path("a"), path("step"), "--model"}).code, 0);

  save("bare", values_, {.optimizer = false});
  result = run({"diff", path("a"), path("bare")});
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.out, AllOf(HasSubstr("optim.embed.weight.exp_avg: F32 (20, 8), only in A\n"),
                                HasSubstr("56 tensors differ\n")));
  EXPECT_THAT(run({"diff", path("bare"), path("a")}).out, HasSubstr("only in B\n"));
  result = run({"diff", "--model", path("a"), path("bare")});
  EXPECT_EQ(result.code, 0) << result.out;
  EXPECT_THAT(result.out, HasSubstr("28 tensors, "));

  auto config = config_;
  config.model.vocab = 21;
  save_model(path("vocab"), config, {}, {.optimizer = false});
  result = run({"diff", path("bare"), path("vocab")});
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.out, AllOf(HasSubstr("embed.weight: F32 (20, 8) and F32 (21, 8)\n"),
                                HasSubstr("config model.vocab: 20 and 21\n"),
                                HasSubstr(": 1 tensor differs\n")));
}

TEST_F(CheckpointCommand, WrongUseIsOneLine) {
  save("a", values_);
  const struct {
    Words words;
    const char* facts;
  } cases[] = {{{"look"}, "'look'"},
               {{"inspect"}, "DIR is required"},
               {{"inspect", path("none")}, "no folder"},
               {{"verify", path("none")}, "no folder"},
               {{"verify", "--all", path("none")}, "no folder"},
               {{"diff", path("a")}, "B is required"},
               {{"diff", path("a"), path("none")}, "no folder"},
               {{"diff", path("a"), path("a"), "--tolerance", "x"}, "--tolerance is 'x'"},
               {{"diff", path("a"), path("a"), "--tolerance", "-1"}, "--tolerance is '-1'"},
               {{"diff", path("a"), path("a"), path("a")}, "checkpoint diff: "},
               {{"export", path("a")}, "OUT is required"},
               {{"export", path("none"), path("x")}, "no folder"},
               {{"export", path("a"), path("x"), "--dtype", "int8"}, "--dtype is 'int8'"},
               {{"export", path("a"), path("x"), "--max-shard-size", "big"}, "size such as 5GB"},
               {{"export", path("a"), path("x"), "--max-shard-size", "0"}, "size such as 5GB"},
               {{"export", path("a"), ""}, "OUT is empty"},
               {{"import", path("a")}, "DIR is required"},
               {{"import", path("a"), ""}, "DIR is empty"},
               {{"import", path("none"), path("x")}, "there is no"}};
  for (const auto& [words, facts] : cases) {
    const Result result = run(words);
    EXPECT_EQ(result.code, 2) << facts;
    EXPECT_THAT(result.err, says(facts));
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
    EXPECT_EQ(result.out, "");
  }
  EXPECT_FALSE(fs::exists(path("x")));
  // Without a verb it says what there is, but has done nothing.
  const Result help = run({"--help"}), nothing = run({});
  EXPECT_EQ(help.code, 0);
  EXPECT_EQ(nothing.code, 2);
  EXPECT_EQ(nothing.err, help.out);
  EXPECT_EQ(nothing.out, "");
}

}  // namespace
}  // namespace lockstep::test
