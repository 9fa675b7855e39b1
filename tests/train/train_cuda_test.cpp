// SPDX-License-Identifier: Apache-2.0
// `lockstep train` on a GPU: ranks that share it follow one process, over NCCL itself; running out
// of its memory is reported.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "lockstep/core/format.h"
#include "lockstep/train/integrity/checksum.h"
#include "tests/train/train_command.h"
#include "tests/train/twelve_layouts.h"

namespace lockstep::test {
namespace {

using testing::AnyOf;
using testing::HasSubstr;

class TrainNccl : public Train {
 protected:
  TrainNccl() { setenv("LOCKSTEP_SHARE_GPU", "1", 1); }
  ~TrainNccl() override { unsetenv("LOCKSTEP_SHARE_GPU"); }

  const Words model_{"--model.layers", "4",       "--train.steps",  "8",   "--optim.lr", "1e-3",
                     "--train.dtype",  "float32", "--train.device", "cuda"};
};

TEST_F(TrainNccl, EveryLayoutFollowsOneProcess) {
  const auto one = losses(steps("one", model_ + Words{"-n", "1"}));
  ASSERT_EQ(one.size(), 8U);
  const auto check = [&](const std::string& name, const Words& layout) {
    SCOPED_TRACE(name);
    expect_close(losses(steps(name, model_ + Words{"--comm.backend", "nccl"} + layout)), one, 1e-4);
  };
  for (const char* ranks : {"2", "4"}) {
    const std::string n = ranks;
    check("dp" + n, {"-n", n});
    check("shard" + n, {"-n", n, "--parallel.shard", "full"});
    check("pp" + n, {"-n", n, "--parallel.pp", n});
  }
  check("tp", {"-n", "2", "--parallel.tp", "2"});
  check("sequence", {"-n", "2", "--parallel.tp", "2", "--parallel.sequence_parallel", "true"});
  check("tp and shard", {"-n", "4", "--parallel.tp", "2", "--parallel.shard", "full"});
}

// Sizes at which the GPU computes in 8 bits; ranks agree on scales.
TEST_F(TrainNccl, EightBitsFollowOneProcess) {
  const Words wide =
      model_ + Words{"--model.kind",  "llama", "--model.hidden", "128",     "--model.ffn", "256",
                     "--model.heads", "4",     "--train.dtype",  "bfloat16"};
  const Words narrow = wide + Words{"--train.precision", "fp8", "--train.fp8_min", "0"};
  const auto one = losses(steps("one", narrow + Words{"-n", "1"}));
  const auto bfloat16 = losses(steps("bfloat16", wide + Words{"-n", "1"}));
  ASSERT_EQ(one.size(), 8U);
  expect_close(one, bfloat16, 0.02);
  EXPECT_NE(one, bfloat16);
  const auto check = [&](const std::string& name, const Words& layout) {
    SCOPED_TRACE(name);
    expect_close(losses(steps(name, narrow + Words{"--comm.backend", "nccl"} + layout)), one, 5e-3);
  };
  check("recompute", {"-n", "1", "--train.recompute", "full"});
  check("dp", {"-n", "2"});
  check("shard", {"-n", "4", "--parallel.shard", "full"});
  check("pp", {"-n", "2", "--parallel.pp", "2"});
  check("tp", {"-n", "4", "--parallel.tp", "4"});
  check("sequence", {"-n", "2", "--parallel.tp", "2", "--parallel.sequence_parallel", "true"});
}

// In float32 nothing but the codes is rounded to fewer bits. A code that falls to the other side
// grows into a difference in the later steps of a model this small.
TEST_F(TrainNccl, EightBitsFollowOneProcessInTwelveLayouts) {
  const Words narrow = model_ + Words{"--model.kind",        "llama", "--model.hidden",       "128",
                                      "--model.ffn",         "256",   "--model.heads",        "4",
                                      "--train.precision",   "fp8",   "--train.fp8_min",      "0",
                                      "--train.micro_batch", "2",     "--train.global_batch", "16"};
  const auto first = [](const std::vector<double>& all) {
    return std::vector(all.begin(), all.begin() + 4);
  };
  const auto one = losses(steps("one", narrow + Words{"-n", "1"}));
  ASSERT_EQ(one.size(), 8U);
  for (const auto& [name, layout] : twelve_layouts(4)) {
    SCOPED_TRACE(name);
    const auto found = losses(steps(name, narrow + Words{"--comm.backend", "nccl"} + layout));
    expect_close(found, one, 5e-3);
    expect_close(first(found), first(one), 1e-3);
  }
}

// Steps from the third on are repeated as CUDA graphs. Validation between steps uses the weights,
// whose 8-bit codes graphs make themselves.
TEST_F(TrainNccl, GraphsHaveTheLossesOfEagerSteps) {
  const Words wide = model_ + Words{"--model.kind",  "llama",    "--model.hidden",     "128",
                                    "--model.ffn",   "256",      "--model.heads",      "4",
                                    "--train.dtype", "bfloat16", "--train.eval_every", "1"};
  const Words eight_bits{"--train.precision", "fp8", "--train.fp8_min", "0"};
  const auto check = [&](const std::string& name, const Words& given) {
    SCOPED_TRACE(name);
    const Words options = given + Words{"--train.time_products", "false"};  // the same algorithms
    const auto eager = losses(steps(name + "eager", options + Words{"--train.graphs", "off"}));
    ASSERT_EQ(eager.size(), 8U);
    expect_close(losses(steps(name, options + Words{"--train.graphs", "on"})), eager, 1e-6);
  };
  for (const auto& [name, ranks] :
       {std::pair{"one ", Words{"-n", "1"}},
        std::pair{"two ", Words{"-n", "2", "--comm.backend", "nccl"}}}) {
    check(name + std::string("float32"), model_ + ranks);
    check(name + std::string("bfloat16"), wide + ranks);
    check(name + std::string("fp8"), wide + eight_bits + ranks);
    const Words accumulating =
        ranks + Words{"--train.global_batch", "24", "--train.micro_batch", "4"};
    check(name + std::string("accumulating"), wide + eight_bits + accumulating);
    check(name + std::string("recomputed"),
          wide + eight_bits + accumulating + Words{"--train.recompute", "full"});
    check(name + std::string("in parts"),
          wide + accumulating + Words{"--train.recompute", "selective", "--train.tile", "16"});
    check(name + std::string("tied"), model_ + accumulating + Words{"--model.tied", "true"});
  }
  check("compressed",
        wide + Words{"-n", "2", "--comm.backend", "nccl", "--comm.compression", "bf16"});
}

// What a graph has recorded is not what such a step computes: with a NaN in the loss, or in one
// gradient of one rank.
TEST_F(TrainNccl, StepsThatAreNotFiniteAreComputedAgainWithGraphs) {
  const Words options = model_ + Words{"--train.graphs", "on", "-n", "2", "--comm.backend", "nccl"};
  const auto plain = losses(steps("plain", options));
  for (const char* action : {"nan", "nan_grad:blocks.1.mlp.up.weight"}) {
    SCOPED_TRACE(action);
    const std::string metrics = path(action + std::string(".jsonl"));
    const Result result = lockstep_command(
        command(options + Words{"--checkpoint.dir", "", "--metrics.file", metrics}),
        {format("LOCKSTEP_FAULT=rank=1,step=5,action={},once={}", action, path(action))});
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_THAT(result.err, HasSubstr("computed again"));
    expect_close(losses(read_steps(metrics)), plain, 1e-6);
  }
}

// A rank is killed in a step. All continue from copies in host memory, with the losses of a run
// that nothing has happened to.
TEST_F(TrainNccl, ALostRankContinuesFromMemoryWithEqualLosses) {
  for (const char* ranks : {"2", "4"}) {
    for (const Words& layout : {Words{}, Words{"--parallel.shard", "full"}}) {
      if (layout.empty() && ranks[0] == '4') continue;
      const std::string name = ranks + (layout.empty() ? "" : layout.back());
      SCOPED_TRACE(name);
      const Words options = model_ + Words{"-n", ranks, "--comm.backend", "nccl"} + layout;
      const auto plain = losses(steps(name, options));
      const std::string metrics = path(name + " lost.jsonl");
      const Result result =
          lockstep_command(command(options + Words{"--recovery", "memory", "--run.max_restarts",
                                                   "2", "--checkpoint.dir", path(name + " lost"),
                                                   "--metrics.file", metrics}),
                           {"LOCKSTEP_FAULT=rank=1,step=5,action=kill"});
      EXPECT_EQ(result.code, 0) << result.err;
      EXPECT_THAT(result.out, AnyOf(HasSubstr("memory at step 4"), HasSubstr("memory at step 3")));
      EXPECT_EQ(losses(read_steps(metrics)), plain);
    }
  }
}

// Flash attention with documents of different lengths, and rings of it; float32 takes another way.
TEST_F(TrainNccl, SharedAndPackedRowsFollowOneProcess) {
  std::string records;
  for (size_t i = 0; i < 40; ++i)
    records += json{{"text", some_text(9).substr(i, 5 + 7 * (i % 8))}}.dump() + "\n";
  write_file(path("texts.jsonl"), records);
  const Words packed{"--data.path", path("texts.jsonl"), "--data.pack", "true"};
  for (const char* type : {"float32", "bfloat16"}) {
    for (const Words& data : {Words{}, packed}) {
      const std::string name = type + std::string(data.empty() ? "" : " packed");
      SCOPED_TRACE(name);
      const Words options = model_ + Words{"--train.dtype", type, "--model.kind", "llama"} + data;
      const auto one = losses(steps(name, options + Words{"-n", "1"}));
      ASSERT_EQ(one.size(), 8U);
      for (const char* way : {"gather", "ring"}) {
        for (const char* tp : {"1", "2"}) {
          const Words layout{"-n",
                             "4",
                             "--comm.backend",
                             "nccl",
                             "--parallel.cp",
                             "2",
                             "--parallel.context",
                             way,
                             "--parallel.tp",
                             tp};
          expect_close(losses(steps(name + way + tp, options + layout)), one,
                       type[0] == 'f' ? 1e-4 : 1e-2);
        }
      }
    }
  }
}

// Ranks may keep the same state in different places.
TEST(ChecksumCuda, IsThatOfTheCpu) {
  at::manual_seed(3);
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kDouble, at::kByte}) {
    for (const int64_t count : {0, 1, 33, 5'000'001}) {
      const at::Tensor memory = at::randint(0, 256, {count * 8}, at::kByte);
      const at::Tensor values = memory.view(dtype).narrow(0, 0, count);
      EXPECT_TRUE(at::equal(train::checksums({values.cuda(), values}),
                            train::checksums({values, values.cuda()})));
      EXPECT_EQ(train::checksums({values.cuda()}).item<int64_t>(),
                train::checksums({values}).item<int64_t>())
          << dtype << " " << count;
    }
  }
  const at::Tensor columns = at::rand({5000, 4000}).narrow(1, 7, 3000);
  EXPECT_TRUE(at::equal(train::checksums({columns}), train::checksums({columns.cuda()})));
}

class TrainCuda : public Train {};

// The model fits, a step does not.
TEST_F(TrainCuda, ARankWithoutMemorySaysWhatItWasFor) {
  const Result result =
      run({"--train.device", "cuda", "--train.seq_len", "256", "--train.micro_batch", "64",
           "--train.global_batch", "64", "--memory.max_per_device", "100MB"});
  EXPECT_NE(result.code, 0);
  for (const char* says :
       {"out of memory: ", " bytes asked for", "the limit is 104857600", "predicted  measured",
        "parameters", "gradients", "optimizer", "activations and buffers", "total"})
    EXPECT_THAT(result.err, HasSubstr(says));
  EXPECT_EQ(
      run({"--train.device", "cuda", "--memory.max_per_device", "200MB", "--train.steps", "4"})
          .code,
      0);
}

// Codes cross the link and are decoded on the device. Updates on it and on the CPU agree.
TEST_F(TrainCuda, CodedParametersTrainNearlyAsWell) {
  for (const char* dtype : {"float32", "bfloat16"}) {
    const std::string name = dtype;
    const Words model{"--train.device", "cuda", "--train.dtype",  name,  "--train.steps", "8",
                      "--model.layers", "2",    "--model.hidden", "128", "--model.heads", "2",
                      "--optim.lr",     "2e-4"};
    const Words offload{"--offload.params",       "true", "--offload.grads",        "true",
                        "--offload.optimizer",    "true", "--offload.strategy",     "extreme",
                        "--offload.device_limit", "4MB",  "--offload.param_budget", "2MB"};
    const auto plain = losses(steps(name + "plain", model + offload));
    for (const char* codec : {"bf16", "int8", "quantization"}) {
      const Words coded = model + offload +
                          Words{"--offload.codec", std::string("params=") + codec + ",grads=bf16"};
      const std::string folder = name + codec;
      const auto there =
          losses(steps(folder + "device", coded + Words{"--offload.update_site", "device"}));
      const auto here =
          losses(steps(folder + "cpu", coded + Words{"--offload.update_site", "cpu"}));
      SCOPED_TRACE(folder);
      expect_close(there, plain, 0.02);
      expect_close(here, there, 1e-3);
    }
    const auto packed =
        losses(steps(name + "lossless", model + offload +
                                            Words{"--offload.codec", "params=lossless",
                                                  "--offload.update_site", "cpu"}));
    expect_close(packed, plain, 1e-3);
  }
}

}  // namespace
}  // namespace lockstep::test
