// SPDX-License-Identifier: Apache-2.0
// Training with products of 8-bit floats: every layout follows one process, and weights are what
// they are in other precisions.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/train/train_command.h"
#include "tests/train/twelve_layouts.h"

namespace lockstep::test {
namespace {

class TrainFloat8 : public Train {
 protected:
  const Words wide_{"--model.kind",   "llama", "--model.hidden", "64",      "--model.heads", "4",
                    "--model.ffn",    "32",    "--train.dtype",  "float32", "--train.steps", "4",
                    "--train.device", "cpu",   "--optim.lr",     "1e-3"};
  const Words model_ = wide_ + Words{"--train.precision", "fp8", "--train.fp8_min", "0"};
  const Words one_{"-n", "1"}, pair_{"-n", "2"}, tensor_{"-n", "2", "--parallel.tp", "2"};
};

// Where products are cut, sums round otherwise, and now and then a value between two codes takes
// the other one. That ranks agree on scales is tested layer by layer, where no value can.
TEST_F(TrainFloat8, EveryLayoutFollowsOneProcess) {
  const auto one = losses(steps("one", model_ + one_));
  const auto wide = losses(steps("wide", wide_ + one_));
  expect_close(one, wide, 0.02);
  EXPECT_NE(one, wide);
  const auto check = [&](const std::string& name, const Words& layout, double relative = 1e-6) {
    SCOPED_TRACE(name);
    expect_close(losses(steps(name, model_ + layout)), one, relative);
  };
  constexpr double kCut = 2e-4;
  const Words sequence = tensor_ + Words{"--parallel.sequence_parallel", "true"};
  check("pp", pair_ + Words{"--parallel.pp", "2", "--parallel.schedule", "zb-h1"});
  check("recompute", one_ + Words{"--train.recompute", "selective"});
  check("offload",
        pair_ + Words{"--parallel.shard", "full", "--offload.params", "true", "--offload.grads",
                      "true", "--offload.optimizer", "true", "--offload.strategy", "extreme",
                      "--offload.device_limit", "4MB", "--offload.param_budget", "500kB"});
  check("tp and shard", {"-n", "4", "--parallel.tp", "2", "--parallel.shard", "full"}, kCut);
  check("sequence", sequence + Words{"--train.recompute", "full"}, kCut);
  if (!tests_all()) return;
  check("dp", pair_);
  check("shard", pair_ + Words{"--parallel.shard", "full"});
  check("1f1b", pair_ + Words{"--parallel.pp", "2"});
  check("full", one_ + Words{"--train.recompute", "full"});
  check("tp", tensor_, kCut);
  check("sequence, selective", sequence + Words{"--train.recompute", "selective"}, kCut);
  check("tp and pp", {"-n", "4", "--parallel.tp", "2", "--parallel.pp", "2"}, kCut);
}

TEST_F(TrainFloat8, TwelveLayoutsOfEightRanksFollowOneProcess) {
  if (!tests_all()) return;
  const Words eight =
      model_ + Words{"--model.layers", "4", "--model.ffn", "64", "--train.global_batch", "16"};
  const auto one = losses(steps("one", eight + one_));
  for (const auto& [name, layout] : twelve_layouts(8)) {
    SCOPED_TRACE(name);
    expect_close(losses(steps(name, eight + layout)), one, 1e-3);
  }
}

TEST_F(TrainFloat8, ResumesWithTheSameBits) {
  const auto one = losses(steps("one", model_ + one_ + Words{"--optim.schedule", "constant"}));
  EXPECT_EQ(moving(model_ + Words{"--optim.schedule", "constant"}, {one_, one_}), one);
}

// Of the products only that of 64 x 32 is smaller than 64.
TEST_F(TrainFloat8, SmallProductsStayWide) {
  const auto all = losses(steps("all", model_ + one_));
  const auto with = [&](const std::string& name, const std::string& least) {
    return losses(steps(name, model_ + Words{"--train.fp8_min", least} + one_));
  };
  EXPECT_EQ(with("thirty-two", "32"), all);
  EXPECT_NE(with("sixty-four", "64"), all);
}

// Biases, and a bias of a layer whose inputs ranks share.
TEST_F(TrainFloat8, GptInTensorParallel) {
  const Words gpt = model_ + Words{"--model.kind", "gpt", "--model.ffn", "128"};
  const auto one = losses(steps("one", gpt + one_));
  expect_close(losses(steps("tp", gpt + tensor_)), one, 2e-4);
}

}  // namespace
}  // namespace lockstep::test
