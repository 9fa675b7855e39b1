// SPDX-License-Identifier: Apache-2.0
// Pipelines of the trainer: the command, its checkpoints, its traces, its refusals.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/train/train_command.h"

namespace lockstep::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

class TrainPipeline : public Train {
 protected:
  static Words pipeline(int ranks, const std::string& schedule, int chunks = 1) {
    return {"-n",     std::to_string(ranks), "--parallel.pp",       "2", "--parallel.schedule",
            schedule, "--parallel.chunks",   std::to_string(chunks)};
  }
  const Words model_{"--model.layers", "4", "--train.steps", "8", "--model.dropout", "0.1"};
};

TEST_F(TrainPipeline, FollowsOneProcess) {
  const Words tied = model_ + Words{"--train.eval_every", "4", "--train.recompute", "selective"};
  const auto one = steps("one", tied + Words{"-n", "1"});
  const auto check = [&](const std::string& name, const Words& layout) {
    expect_follows(name, tied + layout, one);
  };
  check("1f1b", pipeline(2, "1f1b"));
  check("zb-v", pipeline(2, "zb-v", 2));
  check("split", pipeline(2, "zb-h1") + Words{"--parallel.split", "1,5"});
  check("dp", pipeline(4, "interleaved", 2) + Words{"--comm.backend", "gloo"});
  check("sharded", pipeline(4, "1f1b") + Words{"--parallel.shard", "full"});
}

// A run that does not fit in its memory does with `fit`, and computes the same bits.
TEST_F(TrainPipeline, FitRecomputesWhatTheMemoryDemands) {
  const Words sizes{"--model.layers",      "8",   "--train.steps",        "3",
                    "--model.dropout",     "0.1", "--train.seq_len",      "64",
                    "--train.micro_batch", "16",  "--train.global_batch", "64",
                    "--train.device",      "cpu", "--train.threads",      "1"};
  const Words none{"--train.recompute", "none"}, fit{"--train.recompute", "fit"};
  const Words limit{"--memory.max_per_device", "12MB"};
  EXPECT_NE(run(sizes + none + limit).code, 0);
  for (const Words& layout : {Words{"-n", "1"}, pipeline(2, "1f1b")}) {
    const std::string ranks = layout[1];
    const auto expected = steps("none" + ranks, sizes + layout + none);
    // The limit is that of a process.
    const auto found = steps_of_processes("fit" + ranks, sizes + layout + fit + limit);
    EXPECT_EQ(losses(found), losses(expected)) << ranks;
  }
}

TEST_F(TrainPipeline, ReproducibleRunsResumeInOtherLayouts) {
  const Words fixed = model_ + Words{"--train.reproducible", "true",    "--model.kind", "llama",
                                     "--optim.schedule",     "constant"};
  const auto one = losses(steps("one", fixed + Words{"-n", "1"}));
  EXPECT_EQ(moving(fixed, {pipeline(2, "zb-h1"),
                           pipeline(4, "interleaved", 2) + Words{"--parallel.shard", "full"},
                           Words{"-n", "2", "--parallel.shard", "optimizer"},
                           pipeline(2, "looped-bfs", 2)}),
            one);
}

// The same losses wherever ranks stand, and one order resumes what another saved.
TEST_F(TrainPipeline, TheOrderOfRanksChangesNoLoss) {
  const Words fixed = model_ + Words{"--train.reproducible", "true",    "--model.kind", "llama",
                                     "--optim.schedule",     "constant"};
  const auto in_order = [](const std::string& order) {
    return Words{"-n", "4", "--parallel.pp", "2", "--parallel.order", order};
  };
  const auto one = losses(steps("one", fixed + Words{"-n", "1"}));
  EXPECT_EQ(moving(fixed, {in_order("tp_fastest"), in_order("dp-tp-pp"), in_order("pp-tp-dp"),
                           in_order("pp_fastest")}),
            one);
  expect_refused(model_ + in_order("pp-dp"), "parallel.order");
}

TEST_F(TrainPipeline, TheTraceBecomesAPicture) {
  const std::string trace = path("trace");
  const Result trained = run(model_ + pipeline(2, "zb-h1") + Words{"--metrics.trace", trace});
  ASSERT_EQ(trained.code, 0) << trained.err;
  EXPECT_THAT(trained.out, HasSubstr("pipe   zb-h1: 2 stages on 2 ranks, 4 micro-batches, 2 held "
                                     "at most; idle 8 % if stages are alike"));
  const Result measured = lockstep_command({"schedule", "--trace", trace, "--format", "json"});
  ASSERT_EQ(measured.code, 0) << measured.err;
  const Result simulated = lockstep_command(
      {"schedule", "--kind", "zb-h1", "--stages", "2", "--microbatches", "4", "--format", "json"});
  EXPECT_EQ(json::parse(measured.out)["ops"], json::parse(simulated.out)["ops"]);
  EXPECT_EQ(json::parse(measured.out)["peak_live"], json::parse(simulated.out)["peak_live"]);
  EXPECT_GT(json::parse(measured.out)["makespan"].get<double>(), 0);
  const Result drawn = lockstep_command({"schedule", "--trace", trace, "--format", "svg"});
  EXPECT_THAT(drawn.out, AllOf(HasSubstr("<svg"), HasSubstr("rank 1")));
}

TEST_F(TrainPipeline, AScheduleOfOnesOwn) {
  const auto csv = lockstep_command(
      {"schedule", "--kind", "zb-h2", "--stages", "2", "--microbatches", "4", "--format", "csv"});
  write_file(path("mine.csv"), csv.out);
  const Words layout = pipeline(2, "file") + Words{"--parallel.schedule_file", path("mine.csv")};
  const auto one = losses(steps("one", model_ + Words{"-n", "1"}));
  expect_close(losses(steps("file", model_ + layout)), one, 1e-5);
  // Broken files are refused before any rank starts.
  write_file(path("mine.csv"),
             "placement,loop\nF0,B0,F1,B1,F2,B2,F3,B3\nF0,B0,F1,B1,F2,B2,F3,F3\n");
  const Result refused = run(model_ + layout);
  EXPECT_EQ(refused.code, 2);
  EXPECT_THAT(refused.err, AllOf(HasSubstr("mine.csv"), HasSubstr("F3"), Not(HasSubstr("rank0"))));
}

TEST_F(TrainPipeline, WhatDoesNotFitIsOneLine) {
  const auto refused = [&](const Words& options, const std::string& message) {
    expect_refused(model_ + options, message);
  };
  refused({"-n", "8", "--parallel.pp", "8"}, "model.layers is 4 ... multiple ... parallel.pp 8");
  refused(pipeline(2, "1f1b", 2), "1f1b: chunks is 2 ... one chunk");
  refused(pipeline(2, "dualpipe-v", 2) + Words{"--train.global_batch", "6"},
          "microbatches is 3 ... at least twice ... 4");
  refused(pipeline(2, "1f1b") + Words{"--parallel.split", "3,4"},
          "parallel.split is 3, 4: 2 stages with 7 layers");
  refused({"-n", "3", "--parallel.pp", "2"},
          "3 ranks ... divisible by parallel.tp 1 x parallel.pp 2 = 2");
}

}  // namespace
}  // namespace lockstep::test
