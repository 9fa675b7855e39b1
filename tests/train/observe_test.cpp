// SPDX-License-Identifier: Apache-2.0
// What a training run writes about itself: where the time of a step goes, which rank is slow, how
// the layers are.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <map>

#include "lockstep/flight/slow_ranks.h"
#include "lockstep/train/observe/run_observer.h"
#include "tests/support/sampling.h"
#include "tests/support/says.h"
#include "tests/train/train_command.h"

namespace lockstep::test {
namespace {

class Observe : public Train {
 protected:
  ~Observe() override { unsetenv("LOCKSTEP_FAULT"); }

  std::vector<json> events(const std::string& name, const std::string& kind) const {
    std::vector<json> found;
    std::istringstream text(read_file(path(name) + "/events.jsonl"));
    for (std::string line; std::getline(text, line);) {
      const json event = json::parse(line);
      if (event.at("event") == kind) found.push_back(event);
    }
    return found;
  }
  std::vector<json> observed(const std::string& name, const Words& options) const {
    std::filesystem::remove_all(path(name));
    const Words arguments =
        command(Words{"--run.dir", path(name), "--checkpoint.dir", "auto", "--metrics.file", "auto",
                      "--train.steps", "8", "--train.device", "cpu"} +
                options);
    train_in_threads(Words(arguments.begin() + 1, arguments.end()));
    return read_steps(path(name) + "/metrics.jsonl");
  }
};

TEST_F(Observe, TheSplitOfAStepAddsUpToTheStep) {
  for (const Words& layout : {Words{}, Words{"-n", "2"}, Words{"-n", "4"},
                              Words{"-n", "4", "--parallel.pp", "2", "--parallel.tp", "2"}}) {
    const auto steps = observed("split", layout);
    ASSERT_EQ(steps.size(), 8u);
    for (const json& step : steps) {
      double sum = 0;
      for (const auto& [name, ms] : step.at("split").items()) {
        EXPECT_GE(ms.get<double>(), 0) << name;
        if (name != "checkpoint_ms") sum += ms.get<double>();
      }
      const double whole = step.at("step_ms");
      EXPECT_NEAR(sum, whole, 0.02 * whole) << step;
    }
    const json& last = steps.back();
    EXPECT_EQ(last.contains("busy_ms"), !layout.empty());
    EXPECT_GT(last.at("split").at("compute_ms").get<double>(), 0);
    if (layout.size() > 2) {
      EXPECT_EQ(last.at("busy_ms").size(), 4u);
      EXPECT_GT(last.at("split").at("bubble_ms").get<double>(), 0);
    }
  }
}

// Steps take some milliseconds; rank 1 takes half a second longer in three of them.
TEST_F(Observe, ASlowRankIsNamedWithinThreeSteps) {
  setenv("LOCKSTEP_FAULT",
         "rank=1,step=4,action=sleep:0.5;rank=1,step=5,action=sleep:0.5;rank=1,step=6,action=sleep:"
         "0.5",
         1);
  testing::internal::CaptureStdout();
  const auto steps = observed("slow", {"-n", "2"});
  const std::string lines = testing::internal::GetCapturedStdout();
  const auto slow = events("slow", "slow");
  ASSERT_EQ(slow.size(), 1u);
  EXPECT_EQ(slow[0].at("rank"), 1);
  // At the first step at which the rule says so: the third, unless the machine made it slow before.
  int64_t named = 0;
  flight::SlowRanks rule;
  for (size_t i = 0; i < steps.size() && named == 0; ++i) {
    std::vector<int64_t> busy;
    for (const json& ms : steps[i].at("busy_ms"))
      busy.push_back(static_cast<int64_t>(1e6 * ms.get<double>()));
    if (!rule.judge(busy).empty()) named = steps[i].at("step").get<int64_t>();
  }
  EXPECT_LE(named, 6);
  EXPECT_EQ(slow[0].at("step"), named);
  EXPECT_GT(slow[0].at("busy_ms").get<double>(), 500);
  EXPECT_THAT(lines, says("step " + std::to_string(named) + " ... rank 1 ... slow"));
  const Result text = lockstep_command({"report", path("slow"), "--text"});
  EXPECT_THAT(text.out, says("stall"));
}

TEST_F(Observe, AnEventIsWrittenForWhatHappens) {
  // The second one comes when the step is computed again.
  setenv("LOCKSTEP_FAULT", "rank=0,step=3,action=nan;rank=0,step=3,action=nan", 1);
  observed("events", {"-n", "2", "--checkpoint.every", "4", "--metrics.sample_tokens", "5",
                      "--data.validation", "0.1", "--train.eval_tokens", "64"});
  EXPECT_EQ(events("events", "started").size(), 1u);
  EXPECT_EQ(events("events", "finished").size(), 1u);
  EXPECT_EQ(events("events", "saved").size(), 2u);
  EXPECT_EQ(events("events", "skipped").at(0).at("step"), 3);
  EXPECT_THAT(events("events", "warning").at(0).at("text").get<std::string>(),
              says("step 3 ... rank 0"));
  EXPECT_GE(events("events", "sample").at(0).at("text").get<std::string>().size(), 5u);
  const json ranks = events("events", "ranks").at(0).at("ranks");
  ASSERT_EQ(ranks.size(), 2u);
  EXPECT_EQ(ranks[1].at("memory").at("parameters"), ranks[1].at("plan").at("parameters"));
}

TEST_F(Observe, TheHealthOfLayersIsTheSameInEveryLayout) {
  const Words health{"--metrics.health_every", "4"};
  observed("one", health);
  const auto expected = events("one", "health");
  ASSERT_EQ(expected.size(), 2u);
  EXPECT_THAT(expected[0].at("layers").get<std::vector<std::string>>(),
              testing::ElementsAre("embed", "positions", "blocks.0", "blocks.1", "norm"));
  for (const Words& layout :
       {Words{"-n", "2"}, Words{"-n", "2", "--parallel.shard", "full"},
        Words{"-n", "2", "--parallel.tp", "2"}, Words{"-n", "2", "--parallel.pp", "2"},
        Words{"-n", "4", "--parallel.pp", "2", "--parallel.shard", "hybrid",
              "--parallel.shard_size", "2"}}) {
    observed("other", health + layout);
    const auto found = events("other", "health");
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i) {
      for (const char* const quantity :
           {"grad_norm", "grad_max", "grad_zeros", "weight_norm", "weight_max", "update_ratio"}) {
        const auto a = expected[i].at(quantity).get<std::vector<double>>(),
                   b = found[i].at(quantity).get<std::vector<double>>();
        ASSERT_EQ(a.size(), b.size());
        for (size_t layer = 0; layer < a.size(); ++layer)
          EXPECT_NEAR(
              a[layer], b[layer],
              1e-3 * std::abs(a[layer]) + (quantity == std::string("grad_zeros") ? 1e-3 : 1e-9))
              << quantity << " " << layer << " " << layout.back();
      }
    }
  }
}

int64_t resident_bytes() {
  std::istringstream text(read_file("/proc/self/statm"));
  int64_t pages = 0;
  text >> pages >> pages;  // the second number
  return pages * sysconf(_SC_PAGESIZE);
}

// A slow rank comes and goes all the time.
TEST_F(Observe, MemoryDoesNotGrowWithSteps) {
  config::TrainConfig config;
  config.run.dir = path("long");
  config.metrics.file = config.run.dir + "/metrics.jsonl";
  config.metrics.tensorboard = config.run.dir + "/tensorboard";
  std::filesystem::create_directories(config.run.dir);
  train::RunObserver observer(config, comm::Group(), 0);
  int64_t before = 0;
  const int64_t steps = tests_all() ? 1'000'000 : 5'000;
  for (int64_t step = 1; step <= steps; ++step) {
    const double extra = step / 10 % 2 == 0 ? 100 : 0;
    observer.step({.step = step,
                   .loss = 1.0 / static_cast<double>(step),
                   .step_ms = 10 + extra,
                   .time = 1.8e9 + static_cast<double>(step),
                   .busy_ms = {10, 10 + extra, 10, 10},
                   .rank_peak_bytes = {1, 1, 1, 1}});
    if (step == steps / 10) before = resident_bytes();
  }
  EXPECT_LT(resident_bytes() - before, 1 << 20);
  EXPECT_EQ(read_steps(config.metrics.file).size(), static_cast<size_t>(steps));
}

TEST_F(Observe, WhatNeedsARunFolderIsRefusedWithoutOne) {
  for (const char* const key : {"--metrics.health_every", "--metrics.sample_tokens"})
    expect_refused({key, "5"}, std::string(key + 2) + " ... 5 ... run.dir");
  expect_refused({"--metrics.tensorboard", "auto"}, "metrics.tensorboard ... run.dir");
}

}  // namespace
}  // namespace lockstep::test
