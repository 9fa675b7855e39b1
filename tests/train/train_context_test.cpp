// SPDX-License-Identifier: Apache-2.0
// Context parallelism in the trainer: ranks that share rows follow one process, with everything
// else that a run can do.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/train/train_command.h"

namespace lockstep::test {
namespace {

Words context(int ranks, int cp, const Words& others = {}) {
  return Words{"-n", std::to_string(ranks), "--parallel.cp", std::to_string(cp)} + others;
}

class TrainContext : public Train {
 protected:
  TrainContext() {
    std::string records;
    for (int i = 0; i < 40; ++i) {
      const std::string text = some_text(9).substr(static_cast<size_t>(i), 5 + 7 * (i % 8));
      records += json{{"text", text}}.dump() + "\n";
    }
    write_file(path("texts.jsonl"), records);
  }

  // Each layout against one process.
  void compare(const std::string& name, const Words& model, const std::vector<Words>& layouts) {
    const auto one = steps(name, base_ + model);
    for (size_t i = 0; i < layouts.size(); ++i)
      expect_follows(name + std::to_string(i), base_ + model + layouts[i], one);
  }

  // Dropout belongs to the token.
  const Words base_{"--train.steps", "3", "--model.dropout", "0.1", "--train.eval_every", "2"};
  const Words packed_{"--data.path", path("texts.jsonl"), "--data.pack", "true"};
  const Words llama_{"--model.kind", "llama", "--model.window", "9"};
  const Words ring_{"--parallel.context", "ring"}, gather_{"--parallel.context", "gather"};
  const Words tp_{"--parallel.tp", "2"}, pp_{"--parallel.pp", "2"};
  const Words sp_{"--parallel.sequence_parallel", "true"}, full_{"--parallel.shard", "full"};
};

TEST_F(TrainContext, RanksThatShareRowsFollowOneProcess) {
  const Words again{"--train.recompute", "full"}, some{"--train.recompute", "selective"};
  compare("gpt", {},
          {context(2, 2, gather_ + again), context(4, 4, ring_ + some),
           context(4, 2, ring_ + tp_ + sp_ + again), context(4, 2, gather_ + tp_ + sp_ + some)});
  compare("packed", packed_, {context(2, 2, gather_), context(4, 2, ring_ + pp_)});
  compare("llama", llama_ + packed_,
          {context(4, 2, ring_ + full_), context(4, 2, gather_ + tp_), context(4, 4, ring_)});
  if (!tests_all()) return;
  for (const Words& data : {Words{}, packed_}) {
    for (const Words& way : {ring_, gather_}) {
      std::vector<Words> layouts;
      for (const int ranks : {2, 4, 8}) {
        for (const int cp : {2, 4, 8}) {
          for (const char* shard : {"none", "optimizer", "grad_op", "full"}) {
            const Words sharded = way + Words{"--parallel.shard", shard};
            if (cp <= ranks) layouts.push_back(context(ranks, cp, sharded));
            if (2 * cp <= ranks) layouts.push_back(context(ranks, cp, sharded + tp_));
            if (2 * cp <= ranks) layouts.push_back(context(ranks, cp, sharded + pp_));
            if (4 * cp <= ranks) layouts.push_back(context(ranks, cp, sharded + tp_ + pp_));
          }
        }
      }
      compare((data.empty() ? "wide-" : "wide-packed-") + way[1], data, layouts);
    }
  }
}

// Three ranks, four heads that share one of keys, fewer than ranks.
TEST_F(TrainContext, AnyNumberOfRanks) {
  const Words model = Words{"--model.kind",     "llama", "--model.heads",   "4",
                            "--model.kv_heads", "1",     "--train.seq_len", "36"} +
                      packed_;
  compare("odd", model, {context(3, 3, ring_), context(6, 3, gather_)});
}

TEST_F(TrainContext, WithTheRestOfARun) {
  const Words four{"--model.layers", "4"};
  const Words host{"--parallel.shard",       "full",    "--offload.params",       "true",
                   "--offload.grads",        "true",    "--offload.optimizer",    "true",
                   "--offload.strategy",     "extreme", "--offload.device_limit", "4MB",
                   "--offload.param_budget", "500kB"};
  compare("rest", four,
          {context(4, 2, ring_ + Words{"--parallel.shard", "hybrid", "--parallel.shard_size", "2"}),
           context(2, 2, ring_ + host),
           context(2, 2,
                   ring_ + Words{"--memory.strategy", "extreme", "--memory.disk", folder_.path()}),
           context(2, 2,
                   ring_ + Words{"--train.recompute", "fit", "--memory.max_per_device", "64MB"})});
  const Words two_chunks{"--parallel.chunks", "2"};
  std::vector<std::pair<std::string, Words>> schedules{
      {"zb-h1", {}}, {"interleaved", two_chunks}, {"zb-v", two_chunks}};
  if (tests_all()) {
    schedules.insert(schedules.end(), {{"sequential", {}},
                                       {"gpipe", {}},
                                       {"1f1b", {}},
                                       {"zb-h2", {}},
                                       {"looped-bfs", two_chunks},
                                       {"zb-1p", two_chunks},
                                       {"dualpipe-v", two_chunks}});
  }
  std::vector<Words> pipelines;
  for (const auto& [name, others] : schedules)
    pipelines.push_back(context(4, 2, ring_ + pp_ + Words{"--parallel.schedule", name} + others));
  compare("pipelines", four, pipelines);
}

// MLP, norms and loss of some tokens at a time, alone and inside blocks that are recomputed.
TEST_F(TrainContext, TilesOfLongRowsFollowWholeRows) {
  const auto tile = [](const char* tokens, const Words& others = {}) {
    return Words{"--train.tile", tokens} + others;
  };
  const Words full{"--train.recompute", "full"}, some{"--train.recompute", "selective"};
  const Words host{"--memory.strategy", "extreme", "--memory.store", "host"};
  compare("tiles", llama_,
          {tile("8"), tile("5", full), tile("16", some), tile("8", host), tile("32"),
           context(2, 2, ring_ + tile("4", full)), Words{"-n", "2"} + tp_ + sp_ + tile("4", some),
           Words{"-n", "2"} + pp_ + tile("8"), Words{"-n", "2"} + full_ + tile("8", full)});
  compare("tied tiles", packed_, {tile("8", some), Words{"-n", "2"} + tp_ + tile("8")});
  expect_refused(tile("0"), "train.tile ... 0 ... auto, off");
  expect_refused(tile("many"), "train.tile ... many ... auto, off");
  expect_refused({"--memory.store", "host"}, "memory.store is host ... memory.strategy is basic");
}

// Of a rank's tokens the largest values are others, so 8-bit codes round otherwise.
TEST_F(TrainContext, EightBitProductsStayClose) {
  const Words model = base_ + Words{"--train.precision", "fp8",     "--train.fp8_min", "0",
                                    "--train.dtype",     "float32", "--train.device",  "cpu"};
  expect_close(losses(steps("8 bits shared", model + context(2, 2, ring_))),
               losses(steps("8 bits", model)), 0.02);
}

TEST_F(TrainContext, RunsResumeWithOtherRanks) {
  const Words fixed = base_ + Words{"--optim.schedule", "constant"};
  const auto one = losses(steps("one", fixed + Words{"--train.steps", "8"}));
  expect_close(moving(fixed, {context(2, 2, ring_), context(4, 2, gather_ + full_),
                              Words{"-n", "1"}, context(4, 4, ring_ + full_)}),
               one, 1e-5);
}

// Sums over tokens depend on cp; all others do not.
TEST_F(TrainContext, ReproducibleRunsHaveTheBitsOfOtherLayouts) {
  // Gradients of a table that two stages share are summed otherwise.
  const Words model = base_ + Words{"--model.kind", "llama", "--train.reproducible", "true"};
  for (const Words& way : {ring_, gather_}) {
    const auto one = losses(steps("one" + way[1], model + context(2, 2, way)));
    EXPECT_EQ(losses(steps("dp" + way[1], model + context(4, 2, way + full_))), one);
    EXPECT_EQ(losses(steps("pp" + way[1], model + context(4, 2, way + pp_))), one);
    EXPECT_EQ(losses(steps("wide" + way[1], model + context(8, 2, way))), one);
  }
}

TEST_F(TrainContext, WhatDoesNotFitIsOneLine) {
  expect_refused(context(3, 3), "train.seq_len is 32 ... 2 x parallel.cp = 6: 36");
  expect_refused(context(3, 2), "3 ranks ... parallel.cp 2 = 2");
  expect_refused(context(2, 2, {"--parallel.dp", "2"}), "parallel.dp 2 ... parallel.cp 2 = 4");
  expect_refused(Words{"-n", "2"} + ring_, "parallel.context is ring ... parallel.cp is 1");
  expect_refused(context(2, 2, {"--parallel.context", "both"}),
                 "parallel.context ... both ... gather, ring, auto");
}

}  // namespace
}  // namespace lockstep::test
