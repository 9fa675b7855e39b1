// SPDX-License-Identifier: Apache-2.0
// Tensor parallelism and three axes at once in the trainer: the command, its checkpoints, its
// refusals.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/train/train_command.h"

namespace lockstep::test {
namespace {

class TrainTensor : public Train {
 protected:
  static Words cube(const std::string& shard) {
    return {"-n",
            "8",
            "--parallel.dp",
            "2",
            "--parallel.tp",
            "2",
            "--parallel.pp",
            "2",
            "--parallel.schedule",
            "interleaved",
            "--parallel.chunks",
            "2",
            "--parallel.shard",
            shard};
  }
  static Words with_sequence(Words layout) {
    return layout + Words{"--parallel.sequence_parallel", "true"};
  }
  // Products of parts round otherwise; a small learning rate keeps such differences small.
  const Words model_{"--model.layers",  "4",   "--train.steps", "8",
                     "--model.dropout", "0.1", "--optim.lr",    "1e-3"};
  const Words pair_{"-n", "2", "--parallel.tp", "2"};
};

TEST_F(TrainTensor, FollowsOneProcess) {
  const Words tied = model_ + Words{"--train.eval_every", "4"};
  const auto one = steps("one", tied + Words{"-n", "1"});
  const auto check = [&](const std::string& name, const Words& layout) {
    expect_follows(name, tied + layout, one);
  };
  check("tp", pair_);
  check("sequence", with_sequence(pair_) + Words{"--memory.strategy", "standard"});
  check("gloo", pair_ + Words{"--comm.backend", "gloo"});
  check("cube", cube("none"));
  check("sharded cube", with_sequence(cube("full")) + Words{"--memory.strategy", "aggressive"});
}

// Fused projections, an uneven vocabulary and optimizer state find their places again.
TEST_F(TrainTensor, RunsResumeInOtherLayouts) {
  const Words fixed = model_ + Words{"--model.kind",     "llama",   "--model.vocab", "259",
                                     "--optim.schedule", "constant"};
  const auto one = losses(steps("one", fixed + Words{"-n", "1"}));
  expect_close(moving(fixed, {pair_, cube("full"), Words{"-n", "1"}, with_sequence(pair_)}), one,
               1e-5);
}

TEST_F(TrainTensor, WhatDoesNotFitIsOneLine) {
  const auto refused = [&](const Words& options, const std::string& message) {
    expect_refused(model_ + options, message);
  };
  refused({"-n", "3", "--parallel.tp", "3"}, "model.heads is 2 ... divisible by parallel.tp 3");
  refused(pair_ + Words{"--model.ffn", "33"}, "model.ffn is 33 ... divisible by parallel.tp 2");
  refused(pair_ + Words{"--model.kind", "llama", "--model.kv_heads", "1"},
          "model.kv_heads is 1 ... divisible by parallel.tp 2");
  refused(with_sequence(pair_) + Words{"--train.seq_len", "31"},
          "train.seq_len is 31 ... divisible by parallel.tp 2");
  refused(with_sequence({"-n", "2"}),
          "parallel.sequence_parallel is true, but parallel.tp is 1: leave it out");
  refused({"-n", "8", "--parallel.dp", "2", "--parallel.tp", "2", "--parallel.pp", "1"},
          "parallel.dp 2 x tp 2 x pp 1 = 4 ... 8 ranks");
  refused({"-n", "3", "--parallel.tp", "2"},
          "3 ranks ... divisible by parallel.tp 2 x parallel.pp 1 = 2");
}

}  // namespace
}  // namespace lockstep::test
