// SPDX-License-Identifier: Apache-2.0
// `lockstep checkpoint export` as its users meet it, and what it wrote imported again.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>

#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>

#include "lockstep/core/fd.h"
#include "lockstep/formats/safetensors.h"
#include "tests/cli/checkpoint/arrays.h"
#include "tests/data/tokenizer/small_tokenizer.h"
#include "tests/support/says.h"

namespace lockstep::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Json = nlohmann::json;

class CheckpointExport : public CheckpointConvert {};

TEST_F(CheckpointExport, EveryModelGoesThereAndBack) {
  for (const bool tied : {false, true}) {
    for (const auto& [family, config] : families(tied)) {
      const Values values = model_values(config.model);
      const std::string name = family + (tied ? "_tied" : "");
      save_model(path(name), config, values, {.ranks = 3, .dim = 1});
      const std::string out = path(name + "_hf"), back = path(name + "_back");
      Result result = run({"export", path(name), out});
      ASSERT_EQ(result.code, 0) << result.err;
      EXPECT_THAT(result.out, HasSubstr(config.model.describe() + ", float32, "));
      EXPECT_EQ(read_hf(out), arrays_of(config, values)) << name;
      const Json json = Json::parse(read_file(out + "/config.json"));
      EXPECT_EQ(config::model_spec_from_hf(json.dump(), out).resolved(16, 20), config.model);
      EXPECT_EQ(json.value("model_type", ""), family);
      EXPECT_EQ(json.value("torch_dtype", ""), "float32");
      EXPECT_EQ(json.value("dtype", ""), "float32");
      EXPECT_TRUE(json.at("eos_token_id").is_null());

      result = run({"import", out, back});
      ASSERT_EQ(result.code, 0) << result.err;
      EXPECT_THAT(result.out, AllOf(HasSubstr(back + "/step-00000000: "), HasSubstr("bytes\n")));
      EXPECT_EQ(read_checkpoint(back + "/step-00000000"), values) << name;
      result = run({"diff", "--model", path(name), back});
      EXPECT_EQ(result.code, 0) << result.out << result.err;
      const auto manifest = formats::verify(back + "/step-00000000");
      EXPECT_EQ(manifest.state,
                (std::map<std::string, std::string>{{"samples", "0"}, {"tokens", "0"}}));
      const auto saved = config::train_config_from_json(manifest.config, back);
      EXPECT_EQ(saved.model, config.model);
      EXPECT_EQ(saved.data.tokenizer, "bytes");
      EXPECT_EQ(saved.model_path, "");
      EXPECT_EQ(saved.train.seq_len, 16) << "the model has no more positions";
    }
  }
}

TEST_F(CheckpointExport, LargeMatricesGoInPieces) {
  auto config = gpt_;
  config.model.ffn = 140'000;  // 1.1 million elements: more than one piece, and one panel
  config.model.layers = 1;
  config.model.vocab = 150'001;
  const Values values = model_values(config.model);
  save_model(path("run"), config, values, {.ranks = 2, .optimizer = false});
  ASSERT_EQ(run({"export", path("run"), path("out")}).code, 0);
  const Arrays arrays = read_hf(path("out"));
  EXPECT_EQ(arrays.at("transformer.h.0.mlp.c_fc.weight"),
            transposed(values.at("blocks.0.mlp.up.weight"), 140'000, 8));
  EXPECT_EQ(arrays.at("transformer.h.0.mlp.c_proj.weight"),
            transposed(values.at("blocks.0.mlp.down.weight"), 8, 140'000));
  EXPECT_EQ(arrays.at("transformer.wte.weight").values, values.at("embed.weight"));
  ASSERT_EQ(run({"import", path("out"), path("back")}).code, 0);
  EXPECT_EQ(run({"diff", "--model", path("run"), path("back")}).code, 0);
  // More than a piece, from layouts that cut it elsewhere; the last element differs.
  Values changed = values;
  changed.at("embed.weight").back() += 1;
  save_model(path("changed"), config, changed, {.ranks = 3, .dim = 1, .optimizer = false});
  const Result result = run({"diff", path("run"), path("changed")});
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.out, HasSubstr("embed.weight: F32 (150001, 8): 1 of 1200008 elements differ"));
}

TEST_F(CheckpointExport, TypesAreRoundedToNearestEven) {
  Values values = model_values(llama_.model);
  values.at("norm.weight") = {1.0F + 0x1p-8F,  // half way between two of bfloat16: to even
                              1.0F + 0x3p-8F, 3e38F,  1.0F + 0x1p-8F + 0x1p-20F,
                              65519.0F,  // the last that float16 can hold, rounded
                              65520.0F,       -1e-8F, INFINITY};
  values.at("embed.weight")[0] = -7e4F;  // in the tensor that is written first
  write_small_tokenizer(path("tokenizer.json"), 256);
  config::TrainConfig config = llama_;
  config.data.tokenizer = path("tokenizer.json");  // else there is a warning of its own
  save_model(path("run"), config, values, {.optimizer = false});
  const auto exported = [&](const char* dtype, const char* name) {
    const Result result = run({"export", path("run"), path(dtype), "--dtype", dtype});
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_EQ(Json::parse(read_file(path(dtype) + "/config.json"))["torch_dtype"], dtype);
    formats::HfDirectory directory(path(dtype));
    const auto tensor = directory.find("model.norm.weight");
    EXPECT_EQ(tensor.dtype, name);
    std::vector<uint16_t> bits(8);
    std::memcpy(bits.data(), tensor.bytes.data(), 16);
    return std::pair{bits, result.err};
  };
  const auto [bfloat, calm] = exported("bfloat16", "BF16");
  EXPECT_EQ(bfloat, (std::vector<uint16_t>{0x3f80, 0x3f82, 0x7f62, 0x3f81, 0x4780, 0x4780, 0xb22c,
                                           0x7f80}));
  EXPECT_EQ(calm, "");
  const auto [half, warned] = exported("float16", "F16");
  EXPECT_EQ(half, (std::vector<uint16_t>{0x3c04, 0x3c0c, 0x7c00, 0x3c04, 0x7bff, 0x7c00, 0x8000,
                                         0x7c00}));
  EXPECT_THAT(warned, says("checkpoint export: 3 values ... float16 ... infinite"));

  // And back: what 16 bits hold is exact in 32.
  ASSERT_EQ(run({"import", path("bfloat16"), path("back")}).code, 0);
  EXPECT_EQ(read_checkpoint(path("back/step-00000000")).at("norm.weight")[1], 1.0F + 0x4p-8F);
  Result result = run({"diff", "--model", path("run"), path("back")});
  EXPECT_EQ(result.code, 1);
  values.at("norm.weight") = std::vector<float>(8, 1.0F);
  values.at("embed.weight")[0] = 1;
  fs::remove_all(path("run"));
  save_model(path("run"), llama_, values, {.optimizer = false});
  ASSERT_EQ(run({"export", path("run"), path("bfloat16"), "--dtype", "bfloat16", "--force"}).code,
            0);
  ASSERT_EQ(run({"import", path("bfloat16"), path("short"), "--dtype", "bfloat16"}).code, 0);
  result = run({"diff", "--model", path("run"), path("short")});
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.out, HasSubstr("norm.weight: F32 (8) and BF16: 0 of 8 elements differ\n"));
  result = run({"diff", "--model", path("run"), path("short"), "--tolerance", "0.004"});
  EXPECT_EQ(result.code, 0) << result.out;
  EXPECT_EQ(run({"diff", "--model", path("run"), path("short"), "--tolerance", "1e-5"}).code, 1);
}

TEST_F(CheckpointExport, WeightsAreCutIntoFilesBySize) {
  const Values values = model_values(gpt_.model);
  save_model(path("run"), gpt_, values);
  ASSERT_EQ(run({"export", path("run"), path("out"), "--max-shard-size", "1KB"}).code, 0);
  const Json index = Json::parse(read_file(path("out/model.safetensors.index.json")));
  const Arrays expected = arrays_of(gpt_, values);
  std::map<std::string, uint64_t> sizes;
  uint64_t total = 0;
  for (const auto& [name, array] : expected) {
    const std::string file = index["weight_map"].value(name, "");
    ASSERT_TRUE(fs::exists(path("out/" + file))) << name;
    const formats::SafetensorsFile opened(path("out/" + file));
    EXPECT_NE(opened.find(name), nullptr) << name;
    EXPECT_EQ(opened.metadata().at("format"), "pt");
    sizes[file] += array.values.size() * 4;
    total += array.values.size() * 4;
  }
  EXPECT_EQ(index["weight_map"].size(), expected.size());
  EXPECT_EQ(index["metadata"]["total_size"], total);
  EXPECT_GT(sizes.size(), 5u);
  for (const auto& [file, size] : sizes) {
    EXPECT_LE(size, 1024u) << file;
    EXPECT_THAT(file, ::testing::MatchesRegex("model-[0-9]{5}-of-[0-9]{5}.safetensors"));
  }
  EXPECT_FALSE(fs::exists(path("out/model.safetensors")));
  EXPECT_EQ(read_hf(path("out")), expected);
  ASSERT_EQ(run({"import", path("out"), path("back")}).code, 0);
  EXPECT_EQ(run({"diff", "--model", path("run"), path("back")}).code, 0);
  // One tensor a file, also where it is larger.
  ASSERT_EQ(run({"export", path("run"), path("each"), "--max-shard-size", "1"}).code, 0);
  EXPECT_EQ(std::distance(fs::directory_iterator(path("each")), {}),
            static_cast<long>(expected.size()) + 2);
}

TEST_F(CheckpointExport, APlaceThatAnotherProcessWritesIsRefused) {
  save_model(path("run"), gpt_, {});
  fs::create_directory(path("out.lockstep-tmp"));
  write_file(path("out.lockstep-tmp/half"), "written");
  {
    const Fd other(open(path("out.lockstep-tmp").c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    ASSERT_EQ(flock(other.get(), LOCK_EX | LOCK_NB), 0);
    const Result result = run({"export", path("run"), path("out")});
    EXPECT_EQ(result.code, 2);
    EXPECT_THAT(result.err, says(path("out") + " ... another process"));
    EXPECT_TRUE(fs::exists(path("out.lockstep-tmp/half")));
  }
  EXPECT_EQ(run({"export", path("run"), path("out")}).code, 0);
  EXPECT_FALSE(fs::exists(path("out.lockstep-tmp")));
}

TEST_F(CheckpointExport, TokenizersAreCopiedAndNamed) {
  fs::create_directory(path("tokens"));
  write_small_tokenizer(path("tokens/tokenizer.json"), 256);
  write_file(path("tokens/tokenizer_config.json"), "{}");
  auto config = gpt_;
  config.data.tokenizer = path("tokens/tokenizer.json");
  save_model(path("run"), config, {});
  ASSERT_EQ(run({"export", path("run"), path("out")}).code, 0);
  EXPECT_EQ(read_file(path("out/tokenizer.json")), read_file(path("tokens/tokenizer.json")));
  EXPECT_EQ(read_file(path("out/tokenizer_config.json")), "{}");
  const Json described = Json::parse(read_file(path("out/config.json")));
  EXPECT_EQ(described["eos_token_id"], 256);
  EXPECT_TRUE(described.at("bos_token_id").is_null());
  const Result result = run({"import", path("out"), path("back")});
  ASSERT_EQ(result.code, 0) << result.err;
  const auto saved = config::train_config_from_json(
      formats::read_manifest(path("back/step-00000000")).config, "config");
  EXPECT_EQ(saved.data.tokenizer, path("out/tokenizer.json"));
  // A kind that only others read.
  write_file(path("tokens/tokenizer.json"), R"({"model": {"type": "Unigram"}})");
  ASSERT_EQ(run({"export", path("run"), path("other")}).code, 0);
  EXPECT_TRUE(fs::exists(path("other/tokenizer.json")));
  const Result warned = run({"import", path("other"), path("other_back")});
  EXPECT_EQ(warned.code, 0);
  EXPECT_THAT(warned.err, says("another tokenizer"));
  fs::remove_all(path("tokens"));
  ASSERT_EQ(run({"export", path("run"), path("without")}).code, 0);
  EXPECT_FALSE(fs::exists(path("without/tokenizer.json")));
}

TEST_F(CheckpointExport, TokensThatTheModelNamedAreKept) {
  fs::create_directory(path("model"));
  write_small_tokenizer(path("model/tokenizer.json"), 300);
  const std::string generation = R"({"eos_token_id": [260, 258], "temperature": 0.6})";
  write_file(path("model/generation_config.json"), generation);
  write_file(path("model/tokenizer_config.json"), R"({"eos_token": "unused258"})");
  auto config = gpt_;
  config.model.vocab = 301;
  config.data.tokenizer = path("model/tokenizer.json");
  save_model(path("run"), config, {}, {.optimizer = false});
  const auto exported = [&](const std::string& model_config) {
    write_file(path("model/config.json"), model_config);
    const Result result = run({"export", path("run"), path("out"), "--force"});
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_EQ(read_file(path("out/generation_config.json")), generation);
    const Json json = Json::parse(read_file(path("out/config.json")));
    return std::pair(json.at("eos_token_id"), json.at("bos_token_id"));
  };
  EXPECT_EQ(exported(R"({"eos_token_id": [260, 258], "bos_token_id": 259})"),
            std::pair(Json({260, 258}), Json(259)));
  EXPECT_EQ(exported(R"({"eos_token_id": 260})"), std::pair(Json(260), Json(nullptr)));
  // One that was not named is that of the training; one beyond the vocabulary is no token.
  EXPECT_EQ(exported(R"({"bos_token_id": 0})"), std::pair(Json(258), Json(0)));
  EXPECT_EQ(exported(R"({"eos_token_id": 50256, "bos_token_id": 50256})"),
            std::pair(Json(258), Json(nullptr)));
  // The folder is imported with what it says.
  exported(R"({"eos_token_id": [260, 258], "bos_token_id": 259})");
  ASSERT_EQ(run({"import", path("out"), path("back")}).code, 0);
  ASSERT_EQ(run({"export", path("back"), path("again")}).code, 0);
  EXPECT_EQ(read_file(path("again/config.json")), read_file(path("out/config.json")));
  EXPECT_EQ(read_file(path("again/generation_config.json")), generation);
}

TEST_F(CheckpointExport, AnotherFolderIsNotLost) {
  save_model(path("run"), gpt_, {});
  const auto exports = [&](const std::string& out, const Words& more = {}) {
    Words words{"export", path("run"), out};
    words.insert(words.end(), more.begin(), more.end());
    return run(words);
  };
  fs::create_directory(path("out"));
  EXPECT_EQ(exports(path("out/")).code, 0) << "an empty folder is a place";
  write_file(path("out/note"), "mine");
  Result result = exports(path("out"));
  EXPECT_EQ(result.code, 2);
  EXPECT_THAT(result.err, says("out exists ... not empty ... --force"));
  EXPECT_EQ(exports(path("out"), {"--force"}).code, 0);
  EXPECT_FALSE(fs::exists(path("out/note")));
  EXPECT_TRUE(fs::exists(path("out/model.safetensors")));

  result = exports(path("run"), {"--force"});
  EXPECT_EQ(result.code, 2);
  EXPECT_THAT(result.err, HasSubstr("has no config.json"));
  write_file(path("file"), "mine");
  EXPECT_EQ(exports(path("file"), {"--force"}).code, 2);
  result = exports(path("file/out"));
  EXPECT_EQ(result.code, 1);
  EXPECT_EQ(read_file(path("file")), "mine");
  EXPECT_EQ(exports(path("new/deep/out")).code, 0);
  EXPECT_EQ(exports("/proc/nothing/out").code, 1);
  EXPECT_EQ(entries(), (Words{"file", "new", "out", "run"}));

  // As a crash between the two renames leaves it.
  fs::rename(path("out"), path("out.lockstep-old"));
  write_file(path("out.lockstep-old/note"), "mine");
  fs::create_directory(path("out.lockstep-tmp"));
  EXPECT_EQ(exports(path("out")).code, 2);
  EXPECT_EQ(read_file(path("out/note")), "mine");
}

// A limit on the size of files stands for a disk that is full half way.
TEST_F(CheckpointExport, AFailureHalfWayLeavesNothing) {
  auto config = gpt_;
  config.model.vocab = 40'000;
  save_model(path("run"), config, {}, {.optimizer = false});
  ASSERT_EQ(run({"export", path("run"), path("hf")}).code, 0);
  const auto limited = [&](const std::string& words) {
    const std::string script =
        "trap '' XFSZ; ulimit -f 1000; exec " LOCKSTEP_COMMAND " checkpoint ";
    return Subprocess({"sh", "-c", script + words}).wait();
  };
  for (const std::string& words : {"export " + path("run") + " " + path("deep/out"),
                                   "export --force " + path("run") + " " + path("hf"),
                                   "import " + path("hf") + " " + path("deep/run")}) {
    const Result result = limited(words);
    EXPECT_EQ(result.code, 1) << words;
    EXPECT_THAT(result.err, HasSubstr("cannot write ")) << words;
    EXPECT_EQ(entries(), (Words{"hf", "run"})) << words;
  }
  EXPECT_EQ(run({"import", path("hf"), path("back")}).code, 0) << "what was there is whole";
}

TEST_F(CheckpointExport, TheCheckpointMustBeOfItsModel) {
  auto config = gpt_;
  save_model(path("run"), config, {}, {.optimizer = false});
  const auto changed = [&](const std::function<void(formats::Manifest&)>& change) {
    auto manifest = formats::read_manifest(path("run/step-00000007"));
    const auto folder = formats::begin_checkpoint(path("bad"), 7);
    for (const auto& [name, record] : manifest.files) {
      fs::copy_file(path("run/step-00000007/" + name), folder + "/" + name);
    }
    change(manifest);
    formats::commit_checkpoint(path("bad"), manifest);
    const Result result = run({"export", path("bad"), path("deep/out")});
    EXPECT_EQ(result.code, 1);
    EXPECT_FALSE(fs::exists(path("deep")));
    fs::remove_all(path("bad"));
    return result.err;
  };
  EXPECT_THAT(changed([](auto& manifest) { manifest.tensors.erase("norm.bias"); }),
              HasSubstr("has no tensor norm.bias, which gpt needs"));
  EXPECT_THAT(
      changed([](auto& manifest) { manifest.tensors["extra"] = manifest.tensors.at("norm.bias"); }),
      says("tensor extra ... gpt"));
  EXPECT_THAT(changed([&](auto& manifest) {
                auto other = config;
                other.model.vocab = 21;
                manifest.config = config::to_json(other);
              }),
              HasSubstr("tensor embed.weight is (20, 8), must be (21, 8) for gpt: "));
}

}  // namespace
}  // namespace lockstep::test
