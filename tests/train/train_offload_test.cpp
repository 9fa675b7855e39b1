// SPDX-License-Identifier: Apache-2.0
// `lockstep train` with offload: the same losses, to the last digit, and refusals of one line.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/train/train_command.h"

namespace lockstep::test {
namespace {

using testing::HasSubstr;

class TrainOffload : public Train {
 protected:
  static Words offload(const std::string& site) {
    return {"--offload.params",       "true", "--offload.grads",        "true",
            "--offload.optimizer",    "true", "--offload.strategy",     "extreme",
            "--offload.device_limit", kLimit, "--offload.param_budget", "500kB",
            "--offload.update_site",  site};
  }
  // As they are in the file.
  static std::vector<std::string> numbers(const std::vector<json>& steps) {
    std::vector<std::string> texts;
    for (const json& step : steps)
      texts.push_back(step["loss"].dump() + " " + step["grad_norm"].dump());
    return texts;
  }

  // Norms of gradients on the host are summed by the CPU. Only reproducible runs sum as it does on
  // a GPU.
#ifdef LOCKSTEP_TEST_GPU
  static constexpr const char *kReproducible = "true", *kLimit = "4MB";
#else
  static constexpr const char *kReproducible = "false", *kLimit = "1MB";
#endif
  const Words model_{"--train.steps",        "6",          "--model.hidden",  "64",
                     "--model.layers",       "4",          "--train.threads", "1",
                     "--train.reproducible", kReproducible};
};

TEST_F(TrainOffload, HasTheLossesOfTrainingWithout) {
  const std::vector<Words> layouts{
      {"-n", "1"}, {"-n", "2", "--parallel.shard", "full", "--train.global_batch", "8"}};
  for (size_t i = 0; i < layouts.size(); ++i) {
    const Words all = model_ + layouts[i];  // several micro-batches a step
    const auto expected = numbers(steps("plain" + std::to_string(i), all));
    ASSERT_EQ(expected.size(), 6U);
    for (const char* site : {"device", "cpu"}) {
      const std::string name = site + std::to_string(i);
      EXPECT_EQ(numbers(steps(name, all + offload(site))), expected) << name;
    }
  }
}

// Gathers take part of both ranks there, so that none may fetch ahead what the other has no room
// for.
TEST_F(TrainOffload, GathersThatAreCollectivesKeepToTheBudget) {
  const Words all =
      model_ +
      Words{"-n", "2", "--parallel.shard", "full", "--comm.backend", "gloo", "--train.device",
            "cpu"};
  EXPECT_EQ(numbers(steps("offloaded", all + offload("cpu"))), numbers(steps("plain", all)));
}

TEST_F(TrainOffload, SgdHasTheLossesOfTrainingWithout) {
  for (const char* momentum : {"0.9", "0"}) {
    const Words all =
        model_ + Words{"-n",         "2",   "--parallel.shard", "full",  "--optim.name", "sgd",
                       "--optim.lr", "0.1", "--optim.momentum", momentum};
    const auto expected = numbers(steps(std::string("plain") + momentum, all));
    ASSERT_EQ(expected.size(), 6U);
    EXPECT_NE(expected.front(), expected.back());
    const std::string name = std::string("sgd") + momentum;
    EXPECT_EQ(numbers(steps(name, all + offload("device"))), expected) << momentum;
    // Resumed, on the other site.
    steps("again" + name, all + Words{"--train.steps", "3"} + offload("device"));
    EXPECT_EQ(
        numbers(steps("again" + name, all + Words{"--checkpoint.resume", "auto"} + offload("cpu"))),
        expected)
        << momentum;
  }
}

TEST_F(TrainOffload, ReproducibleSumsCountEachMicroBatchOnce) {
  const Words all = model_ + Words{"--train.reproducible", "true", "--train.global_batch", "8"};
  for (const Words& layout : {Words{"-n", "1"}, Words{"-n", "2", "--parallel.shard", "full"}}) {
    const std::string ranks = layout[1];
    const auto expected = numbers(steps("plain" + ranks, all + layout));
    const Words state{"--offload.optimizer",   "true", "--offload.strategy",     "extreme",
                      "--offload.update_site", "cpu",  "--offload.device_limit", "8MB"};
    EXPECT_EQ(numbers(steps("offloaded" + ranks, all + layout + state)), expected) << ranks;
  }
}

TEST_F(TrainOffload, ReportsWhatIsOffloaded) {
  const Result result = run(model_ + Words{"--train.steps", "3"} + offload("device"));
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("offload "));
  EXPECT_THAT(result.out, HasSubstr("on the host; updates on the device"));
  const Result encoded = run(model_ + Words{"--train.steps", "3"} + offload("cpu") +
                             Words{"--offload.codec", "quantization,params=int8,grads=bf16",
                                   "--checkpoint.dir", path("encoded")});
  EXPECT_EQ(encoded.code, 0) << encoded.err;
  EXPECT_THAT(encoded.out, HasSubstr("parameters on the host kept as int8 in 0."));
  EXPECT_THAT(encoded.out, HasSubstr("gradients on the host kept as bf16 in 0.500"));
}

TEST_F(TrainOffload, ResumesFromACheckpointMadeWithoutOffload) {
  const Words all = model_ + Words{"-n", "2", "--parallel.shard", "full"};
  const auto expected = numbers(steps("whole", all));
  for (const char* site : {"device", "cpu"}) {
    const std::string name = site;
    steps(name, all + Words{"--train.steps", "3"});
    const auto found =
        numbers(steps(name, all + Words{"--checkpoint.resume", "auto"} + offload(site)));
    EXPECT_EQ(found, expected) << name;
  }
  // And the other way.
  steps("back", all + offload("device") + Words{"--train.steps", "3"});
  EXPECT_EQ(numbers(steps("back", all + Words{"--checkpoint.resume", "auto"})), expected);
}

// Parameters have been updated when the norm is known: no step can be skipped, so training ends.
TEST_F(TrainOffload, GradientsThatAreNotFiniteEndTrainingWithoutClipping) {
  const Result result = run(model_ + offload("device") +
                            Words{"--offload.clip_mode", "none", "--optim.clip", "0", "--optim.lr",
                                  "1e30", "--offload.device_limit", "4MB"});
  EXPECT_NE(result.code, 0);
  EXPECT_THAT(result.err, HasSubstr("are not finite, and offload.clip_mode none has updated"));
}

TEST_F(TrainOffload, RefusesWhatCannotBe) {
  const Words all = model_ + offload("device");
  expect_refused(all + Words{"--offload.disk", path("missing")}, path("missing"));
  expect_refused(all + Words{"--offload.device_limit", "1kB", "--offload.param_budget", "1kB"},
                 "offload.device_limit is 1 kB");
  expect_refused(all + Words{"--offload.device_limit", "1kB"}, "offload.param_budget is 500 kB");
  const Result ranks =
      run(all + Words{"-n", "2", "--parallel.shard", "full", "--offload.device_limit", "1kB",
                      "--offload.param_budget", "1kB"});
  EXPECT_NE(ranks.code, 0);
  EXPECT_THAT(ranks.err, HasSubstr("offload.device_limit is 1 kB"));
}

}  // namespace
}  // namespace lockstep::test
