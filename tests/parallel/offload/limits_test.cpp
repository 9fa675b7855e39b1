// SPDX-License-Identifier: Apache-2.0
// What offloaded training holds and moves: no more than it may, and what its sizes say.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "tests/parallel/offload/training.h"
#include "tests/support/child_process.h"
#include "tests/support/sampling.h"

namespace lockstep::test {
namespace {

using layout::OffloadOptions;
using layout::OffloadStrategy;
using layout::UpdateSite;
using parallel::OffloadStats;
using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr int64_t kLayers = 17, kWidth = 112;
constexpr int64_t kWeight = kWidth * kWidth, kElements = kWeight + kWidth;  // of a layer

OffloadOptions small_device(UpdateSite site = UpdateSite::device) {
  return {.param_budget = 128 * kKiB,
          .host_budget = 64 * kMiB,
          .device_limit = 320 * kKiB,
          .advanced = {
              .host_limit = 64 * kMiB, .strategy = OffloadStrategy::extreme, .update_site = site}};
}

TEST(OffloadLimits, TrainsTenTimesWhatTheDeviceHolds) {
  for (const UpdateSite site : {UpdateSite::cpu, UpdateSite::device}) {
    const OffloadOptions offload = small_device(site);
    // Parameters, gradients and two moments in float32.
    ASSERT_GE(kLayers * kElements * 16, 10 * offload.device_limit);
    OffloadRun run{.layers = kLayers, .width = kWidth};
    const OffloadCurve plain = train_offloaded({}, run, {});
    int sampled = 0;
    run.after = [&](int step, const parallel::ShardedModel& model, optim::Optimizer&) {
      const OffloadStats stats = parallel::offload_stats(model);
      EXPECT_GT(stats.device_resident, 0) << step;
      EXPECT_LE(stats.device_resident, offload.device_limit) << step;
      EXPECT_LE(stats.device_bytes, offload.device_limit) << step;
      ++sampled;
    };
    const OffloadCurve moved = train_offloaded({}, run, offload);
    EXPECT_EQ(sampled, run.steps);
    ASSERT_EQ(plain.losses, moved.losses);
    EXPECT_TRUE(plain == moved);
    EXPECT_EQ(moved.stats.device_limit, offload.device_limit);
    EXPECT_LE(moved.stats.device_peak, offload.device_limit);
    EXPECT_LE(moved.stats.param_peak, offload.param_budget);
    EXPECT_EQ(moved.stats.params_on_device, 0);
    EXPECT_EQ(moved.stats.params_on_host, kLayers * kElements * 4);
    EXPECT_EQ(moved.stats.state_on_device, 0);
    EXPECT_EQ(moved.stats.site, site);
  }
}

struct Moved {
  int64_t to_device = 0, to_host = 0;
};

// Bytes that each step but the first moves. What the end of a step fetches for the next one is the
// last step's too, so that the difference between n steps and n + 1 is a step.
std::vector<Moved> moved_by(OffloadRun run, const OffloadOptions& offload, OffloadStats* stats) {
  std::vector<Moved> steps;
  for (run.steps = 1; run.steps <= 5; ++run.steps) {
    const OffloadStats before = *stats;
    run.after = [&](int step, const parallel::ShardedModel& model, optim::Optimizer& optimizer) {
      if (step + 1 < run.steps) return;
      dynamic_cast<parallel::OffloadedOptimizer&>(optimizer).wait();
      *stats = parallel::offload_stats(model);
    };
    train_offloaded({}, run, offload);
    if (run.steps > 1)
      steps.push_back({stats->to_device - before.to_device, stats->to_host - before.to_host});
  }
  return steps;
}

TEST(OffloadLimits, EveryStepMovesWhatItMust) {
  const OffloadRun run{.layers = kLayers, .width = kWidth};
  // Both moments, in slices whose parts begin at multiples of 256 bytes.
  const int64_t states = kLayers * 2 * (kWeight * 4 + 512);
  const int64_t values = kLayers * kElements * 4;  // of parameters or gradients
  // Forward fetches all layers, backward all but the last two, which it finds there: the budget
  // holds as many.
  const int64_t fetched = 2 * values - 2 * kElements * 4;
  for (const UpdateSite site : {UpdateSite::device, UpdateSite::cpu}) {
    OffloadStats stats;
    const std::vector<Moved> steps = moved_by(run, small_device(site), &stats);
    EXPECT_EQ(stats.state_on_host, states);
    ASSERT_EQ(steps.size(), 4U);
    const bool here = site == UpdateSite::device;
    for (const Moved& step : steps) {
      // The update fetches state, parameters and gradients, and sends the first two back.
      EXPECT_EQ(step.to_device, fetched + (here ? states + 2 * values : 0));
      EXPECT_EQ(step.to_host, values + (here ? states + values : 0));
    }
  }
}

// With parameters and gradients on the device, only state moves: there and back, unless it is
// updated where it is, which takes gradients there and parameters back.
TEST(OffloadLimits, StateMovesTwiceAStep) {
  const OffloadRun run{.layers = 4, .width = kWidth};
  OffloadOptions offload = small_device();
  offload.params = offload.grads = false;
  offload.device_limit = kMiB;
  for (const UpdateSite site : {UpdateSite::device, UpdateSite::cpu}) {
    offload.advanced.update_site = site;
    OffloadStats stats;
    const std::vector<Moved> steps = moved_by(run, offload, &stats);
    EXPECT_EQ(stats.state_on_host, 4 * 2 * (kWeight * 4 + 512));
    for (const Moved& step : steps) {
      const int64_t bytes = site == UpdateSite::device ? stats.state_on_host : 4 * kElements * 4;
      EXPECT_EQ(step.to_device, bytes);
      EXPECT_EQ(step.to_host, bytes);
    }
  }
}

// ---- too little ----

// A line of /proc/self/status, as a number.
int64_t status_of(const char* key) {
  const Fd file(open("/proc/self/status", O_RDONLY | O_CLOEXEC));
  char text[8192] = {};
  if (read(file.get(), text, sizeof(text) - 1) <= 0) return -1;
  const char* const line = std::strstr(text, key);
  return line == nullptr ? -1 : std::strtoll(line + std::strlen(key), nullptr, 10);
}

// fully_shard throws, leaves no thread and no large mapping, and the model as it was.
void expect_refused(const OffloadOptions& offload, const testing::Matcher<std::string>& message) {
  Tower model(kLayers, kWidth);
  fill_parameters(*model, 3);
  const at::Tensor input = at::ones({2, kWidth});
  const at::Tensor before = model->forward(input);
  const int64_t threads = status_of("Threads:"), mapped = status_of("VmSize:");
  EXPECT_THAT(
      [&] {
        parallel::fully_shard(*model, comm::Group{},
                              {.units = parallel::ByType{{"Layer"}}, .offload = offload});
      },
      ThrowsMessage<ConfigError>(message));
  EXPECT_EQ(status_of("Threads:"), threads);
  EXPECT_LT(status_of("VmSize:"), mapped + 1024 * kKiB);  // in kB
  EXPECT_TRUE(model->forward(input).equal(before));
}

TEST(OffloadLimits, BudgetsThatAreTooSmallAreRefusedWithTheNumbers) {
  OffloadOptions offload = small_device();
  offload.param_budget = 48 * kKiB;
  // The line is in pages.
  expect_refused(offload, AllOf(HasSubstr("offload.param_budget is 48 kB"), HasSubstr("layer0"),
                                HasSubstr("52 kB")));
  offload = small_device();
  offload.device_limit = offload.param_budget;
  expect_refused(offload, AllOf(HasSubstr("offload.device_limit is 128 kB"), HasSubstr("must hold"),
                                HasSubstr("the largest unit, "), HasSubstr("52 kB")));
  offload = small_device();
  offload.device_limit = 4 * 1024 * kMiB;  // which a rest of it would be seen by
  offload.host_budget = kMiB;
  expect_refused(offload, AllOf(HasSubstr("offload.host_budget is 1 MB, but 3.39 MB"),
                                HasSubstr("are offloaded"), HasSubstr("offload.disk")));
  offload.host_budget = 0;
  offload.advanced.host_limit = kMiB;
  expect_refused(offload, HasSubstr("1 MB, but 3.39 MB"));
}

// The least that fully_shard accepts, in pages.
void expect_least_is_enough(OffloadOptions offload, int64_t OffloadOptions::*budget, int64_t from) {
  const OffloadRun run{.layers = 5, .width = kWidth, .steps = 3};
  const OffloadCurve plain = train_offloaded({}, run, {});
  for (int64_t bytes = from;; bytes += 4 * kKiB) {
    ASSERT_LT(bytes, from + 2 * kMiB);
    offload.*budget = bytes;
    try {
      EXPECT_TRUE(plain == train_offloaded({}, run, offload)) << bytes;
    } catch (const ConfigError&) {
      continue;
    }
    EXPECT_GT(bytes, from);
    return;
  }
}

TEST(OffloadLimits, TheLeastThatIsAcceptedIsEnough) {
  for (const UpdateSite site : {UpdateSite::cpu, UpdateSite::device}) {
    expect_least_is_enough(small_device(site), &OffloadOptions::host_budget, 512 * kKiB);
    expect_least_is_enough(small_device(site), &OffloadOptions::param_budget, 16 * kKiB);
  }
}

// ---- shared modules ----

// Blocks of two layers; the second is one that all of them have.
class SharingBlockImpl : public torch::nn::Module {
 public:
  SharingBlockImpl(int64_t width, Layer shared)
      : own_(register_module("own", Layer(width))), shared_(register_module("shared", shared)) {}
  at::Tensor forward(const at::Tensor& x) { return shared_(own_(x)); }

 private:
  Layer own_, shared_;
};
TORCH_MODULE(SharingBlock);

class SharingTowerImpl : public torch::nn::Module {
 public:
  SharingTowerImpl() {
    const Layer shared(kWidth);
    for (int64_t i = 0; i < 4; ++i)
      blocks_.push_back(register_module("block" + std::to_string(i), SharingBlock(kWidth, shared)));
    fill_parameters(*this, 3);
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& block : blocks_) x = block(x);
    return x;
  }

 private:
  std::vector<SharingBlock> blocks_;
};
TORCH_MODULE(SharingTower);

void train_sharing(const comm::Group& group, const OffloadOptions& offload) {
  SharingTower model;
  auto sharded = parallel::fully_shard(*model, group,
                                       {.units = parallel::ByType{{"SharingBlock"}},
                                        .min_num_params = 100,
                                        .use_orig_params = true,
                                        .offload = offload});
  const auto optimizer = make_optimizer(sharded, /*offloaded=*/true, {});
  for (int step = 0; step < 2; ++step) {
    const at::Tensor input = at::sin(at::arange(6 * kWidth, at::kFloat).view({6, kWidth}));
    model->forward(input).square().mean().backward();
    if (offload.advanced.clip_mode == layout::ClipMode::exact) sharded.clip_grad_norm_(0.05);
    optimizer->step();
    optimizer->zero_grad();
  }
}

int64_t bytes_named_in(const std::string& message) {
  const size_t end = message.find(" bytes)"), begin = message.rfind('(', end);
  return end == std::string::npos ? 0 : std::stoll(message.substr(begin + 1));
}

// The first message names what is enough; less is refused.
void expect_named_is_enough(OffloadOptions offload, int64_t OffloadOptions::*budget) {
  const auto refusal = [&] {
    try {
      train_sharing({}, offload);
    } catch (const ConfigError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  offload.*budget = budget == &OffloadOptions::device_limit ? offload.param_budget : 16 * kKiB;
  const std::string first = refusal();
  ASSERT_GT(bytes_named_in(first), offload.*budget) << first;
  offload.*budget = bytes_named_in(first);
  EXPECT_EQ(refusal(), "");
  --(offload.*budget);
  EXPECT_GT(bytes_named_in(refusal()), offload.*budget);
}

TEST(OffloadLimits, TheLeastThatIsNamedIsEnoughForSharedModules) {
  for (const UpdateSite site : {UpdateSite::cpu, UpdateSite::device}) {
    for (const auto clip : {layout::ClipMode::exact, layout::ClipMode::none}) {
      for (const bool grads : {true, false}) {
        OffloadOptions offload = small_device(site);
        offload.advanced.clip_mode = clip;
        offload.grads = grads;
        offload.device_limit = 4 * kMiB;
        expect_named_is_enough(offload, &OffloadOptions::param_budget);
        offload.param_budget = 100 * kKiB;
        expect_named_is_enough(offload, &OffloadOptions::host_budget);
        expect_named_is_enough(offload, &OffloadOptions::device_limit);
      }
    }
  }
}

// What one rank refuses the other does too, and does not wait.
TEST(OffloadLimits, RanksRefuseTogether) {
  for (int64_t limit = 300 * kKiB; limit < 420 * kKiB; limit += 4 * kKiB) {
    std::vector<int> refused(2, 0);
    comm::run_threads(2, [&](const comm::Group& group) {
      OffloadOptions offload = small_device();
      offload.param_budget = 100 * kKiB;
      offload.device_limit = limit;
      SharingTower model;
      try {
        parallel::fully_shard(*model, group,
                              {.units = parallel::ByType{{"SharingBlock"}},
                               .min_num_params = 100,
                               .offload = offload});
      } catch (const ConfigError&) {
        refused[static_cast<size_t>(group.rank())] = 1;
      }
    });
    EXPECT_EQ(refused[0], refused[1]) << limit;
  }
}

// What is not refused at the start is enough to the end: nothing may fail in a step.
TEST(OffloadLimits, WhatTwoRanksAcceptIsEnough) {
  for (const UpdateSite site : {UpdateSite::cpu, UpdateSite::device}) {
    for (const auto clip : {layout::ClipMode::exact, layout::ClipMode::none}) {
      for (const bool grads : {true, false}) {
        int trained = 0;
        const int64_t step = tests_all() ? 2 * kKiB : 20 * kKiB;
        for (int64_t limit = 200 * kKiB; limit < 900 * kKiB && trained < 3; limit += step) {
          comm::run_threads(2, [&](const comm::Group& group) {
            OffloadOptions offload = small_device(site);
            offload.advanced.clip_mode = clip;
            offload.grads = grads;
            offload.param_budget = 100 * kKiB;
            offload.device_limit = limit;
            try {
              train_sharing(group, offload);
              if (group.rank() == 0) ++trained;
            } catch (const ConfigError&) {
            }
          });
        }
        EXPECT_EQ(trained, 3);
      }
    }
  }
}

// In a process of its own, which cannot lock more than a megabyte.
TEST(OffloadLimits, APinThatIsRefusedSaysHowMuchIsAllowed) {
  EXPECT_EQ(in_a_fresh_process([]() -> std::string {
              const int64_t before = status_of("VmLck:");  // what libraries locked
              const rlimit limit{kMiB, kMiB};
              if (setrlimit(RLIMIT_MEMLOCK, &limit) != 0) return "setrlimit";
              // Root may lock what it wants.
              if (geteuid() == 0 && setuid(65534) != 0) return "setuid";
              OffloadOptions offload = small_device();
              offload.advanced.pin = true;
              try {
                train_offloaded({}, {.layers = kLayers, .width = kWidth}, offload);
                return "was not refused";
              } catch (const Error& error) {
                const std::string text = error.what();
                for (const char* part : {"cannot pin", "are pinned already", "the limit is 1 MB",
                                         "offload.pin to false"}) {
                  if (text.find(part) == std::string::npos) return text;
                }
              }
              return status_of("VmLck:") == before ? "" : "something is still locked";
            }),
            "");
}

}  // namespace
}  // namespace lockstep::test
