// SPDX-License-Identifier: Apache-2.0
// Activations that a step shows, and what leaves the device because of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/parallel/offload/training.h"
#include "tests/support/says.h"
#include "tests/support/subprocess.h"

namespace lockstep::test {
namespace {

using layout::ClipMode;
using layout::OffloadOptions;
using layout::OffloadStrategy;
using layout::UpdateSite;
using optim::NamedTensor;
using parallel::OffloadStats;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

constexpr const char* kLine = "[offload] activations and temporaries";

// Everything of 8 layers is on the device before the first step: 1.7 MB, and 0.6 MB for what is
// being used. Conservative: 3.2 MB may be there; what has to leave leaves 2.6 MB.
OffloadOptions large_device(UpdateSite site, ClipMode clip = ClipMode::exact) {
  return {.param_budget = 2 * kMiB,
          .host_budget = 64 * kMiB,
          .device_limit = 3584 * kKiB,
          .advanced = {.host_limit = 64 * kMiB,
                       .strategy = OffloadStrategy::conservative,
                       .update_site = site,
                       .clip_mode = clip}};
}

// Batches of so many rows; kSome has about 1 MB of activations, kMany 2.3 MB, and kTooMany more
// than the device.
constexpr int64_t kFew = 6, kSome = 181, kMany = 400, kTooMany = 900;
OffloadRun run_of(std::function<int64_t(int step)> rows, ClipMode clip = ClipMode::exact) {
  OffloadRun run{.layers = 8, .steps = 4, .clip = clip == ClipMode::none ? 0 : 0.05};
  run.rows = std::move(rows);
  return run;
}

int count_of(const std::string& text, const std::string& part) {
  int count = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++count;
  return count;
}

// What rank 0 has after each step, and what all say.
struct Watched {
  std::vector<OffloadStats> stats;
  std::vector<std::vector<NamedTensor>> states;  // of the optimizer
  std::string log;
};

// Trains with offload and without, and expects the same bits.
Watched watch(int ranks, const OffloadRun& run, const OffloadOptions& offload) {
  Watched watched;
  testing::internal::CaptureStderr();
  comm::run_threads(ranks, [&](const comm::Group& group) {
    const OffloadCurve plain = train_offloaded(group, run, {});
    OffloadRun sampled = run;
    sampled.after = [&](int, const parallel::ShardedModel& model, optim::Optimizer& optimizer) {
      if (group.rank() > 0) return;
      watched.stats.push_back(parallel::offload_stats(model));
      watched.states.push_back(optimizer.state());
    };
    const OffloadCurve moved = train_offloaded(group, sampled, offload);
    ASSERT_EQ(plain.losses, moved.losses) << ranks << " ranks";
    EXPECT_TRUE(plain == moved) << ranks << " ranks";
    EXPECT_LE(moved.stats.device_peak, moved.stats.device_limit);
    EXPECT_LE(moved.stats.host_peak, moved.stats.host_budget);
  });
  watched.log = testing::internal::GetCapturedStderr();
  return watched;
}

bool same_states(const std::vector<NamedTensor>& a, const std::vector<NamedTensor>& b) {
  return std::ranges::equal(a, b, [](const NamedTensor& left, const NamedTensor& right) {
    return left.name == right.name && left.tensor.equal(right.tensor);
  });
}

TEST(OffloadPressure, FewActivationsMoveNothing) {
  for (const int ranks : {1, 2}) {
    const Watched watched =
        watch(ranks, run_of([](int) { return kFew; }), large_device(UpdateSite::device));
    EXPECT_THAT(watched.log, Not(HasSubstr(kLine)));
    for (const OffloadStats& stats : watched.stats) {
      EXPECT_GT(stats.activation_peak, 0);
      EXPECT_LT(stats.activation_peak, 512 * kKiB);
      EXPECT_EQ(stats.decisions, 0);
      EXPECT_EQ(stats.state_on_host, 0);
      EXPECT_EQ(stats.grads_kept.bytes, 0);
    }
  }
}

// After the first step, once, with a line for each rank; the same bits as without offload, and the
// same optimizer state as with places that stay, which is what checkpoints have.
TEST(OffloadPressure, StateLeavesAfterTheFirstStep) {
  for (const ClipMode clip : {ClipMode::exact, ClipMode::none}) {
    for (const UpdateSite site : {UpdateSite::device, UpdateSite::cpu}) {
      for (const int ranks : {1, 2}) {
        const OffloadRun run = run_of([](int) { return kMany; }, clip);
        const Watched watched = watch(ranks, run, large_device(site, clip));
        EXPECT_EQ(count_of(watched.log, kLine), ranks) << watched.log;
        EXPECT_THAT(watched.log, AllOf(says("optimizer state ... to the host"),
                                       HasSubstr("more than 0.9 x offload.device_limit, 3.5 MB")));
        OffloadOptions unlimited = large_device(site, clip);
        unlimited.device_limit = unlimited.param_budget = 64 * kMiB;
        const Watched stayed = watch(ranks, run, unlimited);
        EXPECT_THAT(stayed.log, Not(HasSubstr(kLine)));
        ASSERT_EQ(watched.stats.size(), stayed.stats.size());
        for (size_t step = 0; step < watched.stats.size(); ++step) {
          const OffloadStats &stats = watched.stats[step], &first = watched.stats[0];
          EXPECT_EQ(stats.decisions, 1) << step;
          EXPECT_EQ(stats.activation_peak, first.activation_peak) << step;
          EXPECT_EQ(stats.state_on_device, 0) << step;
          EXPECT_EQ(stats.state_on_host, first.state_on_host) << step;
          EXPECT_GT(stats.state_on_host, 0) << step;
          EXPECT_EQ(stats.state_kept.bytes, stats.state_on_host) << step;
          EXPECT_EQ(stayed.stats[step].state_on_host, 0);
          EXPECT_TRUE(same_states(watched.states[step], stayed.states[step])) << step;
        }
        // From the second backward on.
        EXPECT_EQ(watched.stats[1].grads_kept.bytes > 0, clip == ClipMode::exact);
      }
    }
  }
}

// Each has a copy of its own of a parameter that the CPU updates: one that was made for the state
// that left first must not be used for what leaves later.
TEST(OffloadPressure, LargerBatchesDecideAgain) {
  for (const UpdateSite site : {UpdateSite::device, UpdateSite::cpu}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      OffloadRun run = run_of([](int step) { return step < 2 ? kSome : kMany; });
      run.dtype = dtype;
      OffloadOptions offload = large_device(site);
      const Watched watched = watch(1, run, offload);
      EXPECT_EQ(count_of(watched.log, kLine), 2) << watched.log;
      const OffloadStats &first = watched.stats[0], &last = watched.stats[2];
      EXPECT_EQ(first.decisions, 1);
      EXPECT_GT(first.state_on_host, 0);
      // A slice of the first tensor, which has two.
      if (dtype == at::kFloat) {
        EXPECT_EQ(first.state_on_device, 2 * 9472 * 4) << watched.log;
      } else {
        EXPECT_GT(first.state_on_device, 0);
      }
      EXPECT_EQ(watched.stats[1].state_on_host, first.state_on_host);
      EXPECT_EQ(last.decisions, 2);
      EXPECT_GT(last.activation_peak, first.activation_peak);
      EXPECT_EQ(last.state_on_device, 0);
      EXPECT_EQ(watched.stats[3].decisions, 2);
    }
  }
}

TEST(OffloadPressure, IsTheSameInEveryRun) {
  const OffloadRun run = run_of([](int step) { return step < 2 ? kSome : kMany; });
  for (const int ranks : {1, 2}) {
    const Watched one = watch(ranks, run, large_device(UpdateSite::device));
    const Watched other = watch(ranks, run, large_device(UpdateSite::device));
    for (size_t step = 0; step < one.stats.size(); ++step) {
      EXPECT_EQ(one.stats[step].activation_peak, other.stats[step].activation_peak);
      EXPECT_EQ(one.stats[step].state_on_host, other.stats[step].state_on_host);
      EXPECT_EQ(one.stats[step].decisions, other.stats[step].decisions);
    }
  }
}

TEST(OffloadPressure, WhatTheHostDoesNotHoldGoesToTheDisk) {
  const TempDir folder;
  for (const char* codec : {"none", "lossless"}) {
    OffloadOptions offload = large_device(UpdateSite::cpu);
    offload.grads = false;
    offload.host_budget = 1200 * kKiB;
    offload.disk = folder.path();
    offload.codec = layout::parse_state_codecs(codec);
    const Watched watched = watch(1, run_of([](int) { return kMany; }), offload);
    EXPECT_THAT(watched.log, says("optimizer state ... to the disk")) << codec;
    EXPECT_EQ(watched.stats[0].state_on_device, 0);
    EXPECT_GT(watched.stats[0].state_on_host, 0);
    EXPECT_GT(watched.stats[0].state_on_disk, 0);
    EXPECT_GT(watched.stats[0].to_disk, 0);
    EXPECT_GT(watched.stats[3].from_disk, watched.stats[0].from_disk);
  }
}

// No error: everything stays, and a warning says why.
TEST(OffloadPressure, AHostWithoutRoomIsAWarning) {
  OffloadOptions offload = large_device(UpdateSite::device);
  offload.host_budget = 64 * kKiB;
  const Watched watched = watch(1, run_of([](int) { return kMany; }), offload);
  EXPECT_EQ(count_of(watched.log, kLine), 1) << watched.log;
  EXPECT_THAT(watched.log, HasSubstr("nothing moved: offload.host_budget is 64 kB"));
  EXPECT_EQ(watched.stats[3].state_on_host, 0);
  EXPECT_EQ(watched.stats[3].decisions, 1);
}

TEST(OffloadPressure, MoreThanTheDeviceHasIsAWarning) {
  const Watched watched =
      watch(1, run_of([](int) { return kTooMany; }), large_device(UpdateSite::device));
  EXPECT_EQ(count_of(watched.log, kLine), 1) << watched.log;
  EXPECT_THAT(watched.log, says("device stays above"));
  EXPECT_EQ(watched.stats[0].state_on_device, 0);
}

// Gradients that nobody has zeroed, and those of micro-batches, are added to where they are; then
// they leave.
TEST(OffloadPressure, GradientsLeaveWhenThereAreNone) {
  for (const int ranks : {1, 2}) {
    OffloadRun run = run_of([](int) { return kMany; });
    run.accumulation = 2;
    const Watched watched = watch(ranks, run, large_device(UpdateSite::device));
    EXPECT_THAT(watched.log, says("gradients ... on the host"));
    EXPECT_EQ(watched.stats[0].grads_kept.bytes, 0);
    EXPECT_GT(watched.stats[1].grads_kept.bytes, 0);
    EXPECT_LT(watched.stats[3].device_bytes, watched.stats[0].device_bytes);
    run.zeroes = false;
    const Watched kept = watch(ranks, run, large_device(UpdateSite::device));
    EXPECT_EQ(kept.stats[3].grads_kept.bytes, 0);
  }
}

}  // namespace
}  // namespace lockstep::test
