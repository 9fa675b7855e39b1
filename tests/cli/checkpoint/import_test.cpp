// SPDX-License-Identifier: Apache-2.0
// `lockstep checkpoint import` as its users meet it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <functional>

#include "lockstep/io/folder_lock.h"
#include "tests/cli/checkpoint/arrays.h"
#include "tests/support/says.h"

namespace lockstep::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class CheckpointImport : public CheckpointConvert {};

TEST_F(CheckpointImport, NamesOfTheHubAndBuffersAreRead) {
  const Values values = model_values(gpt_.model);
  Arrays arrays = gpt2_arrays(values, true, "");
  arrays["h.0.attn.bias"] = {{1, 1, 2, 2}, {1, 0, 1, 1}};
  arrays["h.1.attn.masked_bias"] = {{}, {-1e4F}};
  arrays["lm_head.weight"] = arrays.at("wte.weight");  // tied, and saved all the same
  write_hf(path("hf"), gpt_.model, arrays);
  Result result = run({"import", path("hf"), path("run")});
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(read_checkpoint(path("run/step-00000000")), values);

  Arrays rotary = llama_arrays(llama_.model, model_values(llama_.model));
  rotary["model.layers.0.self_attn.rotary_emb.inv_freq"] = {{1}, {1}};
  write_hf(path("rotary"), llama_.model, rotary);
  result = run({"import", path("rotary"), path("llama")});
  EXPECT_EQ(result.code, 0) << result.err;

  result = run({"import", path("hf"), path("run")});
  EXPECT_EQ(result.code, 2);
  EXPECT_THAT(result.err, says("run ... checkpoints already ... step 0"));
}

TEST_F(CheckpointImport, AFolderThatAnotherProcessSavesInIsRefused) {
  write_hf(path("hf"), gpt_.model, gpt2_arrays(model_values(gpt_.model), true, ""));
  const io::FolderLock lock(path("run"));
  const Result result = run({"import", path("hf"), path("run")});
  EXPECT_EQ(result.code, 2);
  EXPECT_THAT(result.err,
              AllOf(says(path("run") + " ... pid"), HasSubstr(std::to_string(getpid()))));
  EXPECT_NO_THROW(lock.require_held());
}

TEST_F(CheckpointImport, WrongFoldersAreRefusedBeforeAnythingIsWritten) {
  const Arrays sound = gpt2_arrays(model_values(gpt_.model), true, "transformer.");
  const auto refused = [&](const std::function<void(Arrays&)>& change, int code = 1) {
    Arrays arrays = sound;
    change(arrays);
    write_hf(path("hf"), gpt_.model, arrays);
    const Result result = run({"import", path("hf"), path("deep/run")});
    EXPECT_EQ(result.code, code);
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
    EXPECT_FALSE(fs::exists(path("deep")));
    return result.err;
  };
  EXPECT_THAT(refused([](Arrays& arrays) {
                arrays.erase("transformer.ln_f.bias");
                arrays.erase("transformer.h.1.mlp.c_fc.weight");
              }),
              AllOf(HasSubstr("2 of the 28 tensors of gpt: "),
                    HasSubstr("are missing: h.1.mlp.c_fc.weight, ln_f.bias")));
  EXPECT_THAT(refused([](Arrays& arrays) {
                arrays["transformer.h.2.ln_1.bias"] = {{1}, {0}};
                arrays["score.weight"] = {{1}, {0}};
              }),
              AllOf(HasSubstr("has 2 tensors that gpt: "),
                    HasSubstr("does not have: score.weight, transformer.h.2.ln_1.bias")));
  EXPECT_THAT(refused([](Arrays& arrays) {
                arrays.at("transformer.h.0.mlp.c_fc.weight").shape = {12, 8};
              }),
              HasSubstr("transformer.h.0.mlp.c_fc.weight is (12, 8), must be (8, 12) for "
                        "blocks.0.mlp.up.weight"));
  EXPECT_THAT(refused([](Arrays& arrays) {
                arrays["lm_head.weight"] = arrays.at("transformer.wte.weight");
                arrays["lm_head.weight"].values[3] += 1;
              }),
              HasSubstr("lm_head.weight differs from transformer.wte.weight"));

  fs::remove(path("hf/model.safetensors"));
  EXPECT_THAT(run({"import", path("hf"), path("x")}).err, HasSubstr("has neither model"));
  write_file(path("hf/pytorch_model.bin"), "PK");
  Result result = run({"import", path("hf"), path("x")});
  EXPECT_EQ(result.code, 2);
  EXPECT_THAT(result.err, AllOf(HasSubstr("pytorch_model.bin"), HasSubstr("save_pretrained")));
  write_file(path("hf/model.safetensors.index.json"),
             R"({"weight_map": {"transformer.wte.weight": "../x"}})");
  result = run({"import", path("hf"), path("x")});
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.err, says("\"../x\" ... plain name"));
  write_file(path("hf/config.json"), R"({"model_type": "mamba"})");
  result = run({"import", path("hf"), path("x")});
  EXPECT_EQ(result.code, 2);
  EXPECT_THAT(result.err,
              HasSubstr("model_type is \"mamba\", must be gpt2, llama, mistral, qwen2 or qwen3"));
  write_file(path("file"), "mine");
  write_hf(path("hf"), gpt_.model, sound);
  EXPECT_EQ(run({"import", path("hf"), path("file/run")}).code, 1);
  EXPECT_EQ(entries(), (Words{"file", "hf"}));
}

}  // namespace
}  // namespace lockstep::test
