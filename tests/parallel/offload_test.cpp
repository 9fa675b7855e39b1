// Offloaded training has the bits of training without offload, whatever rests where.
#include <gtest/gtest.h>

#include "tests/parallel/offload_training.h"

namespace lockstep::test {
namespace {

using layout::ClipMode;
using layout::OffloadOptions;
using layout::OffloadStrategy;
using layout::UpdateSite;

constexpr int64_t kKiB = 1024, kMiB = 1024 * 1024;

OffloadOptions everything(UpdateSite site = UpdateSite::device) {
  return {.param_budget = 512 * kKiB,
          .host_budget = 64 * kMiB,
          .device_limit = kMiB,
          .host_limit = 64 * kMiB,
          .strategy = OffloadStrategy::extreme,
          .update_site = site};
}

void expect_same(int ranks, const OffloadRun& run, const OffloadOptions& offload,
                 const std::string& what) {
  comm::run_threads(ranks, [&](const comm::Group& group) {
    const OffloadCurve plain = train_offloaded(group, run, {});
    const OffloadCurve moved = train_offloaded(group, run, offload);
    ASSERT_EQ(plain.losses, moved.losses) << what << ", " << ranks << " ranks";
    EXPECT_TRUE(plain == moved) << what << ", " << ranks << " ranks";
    EXPECT_LE(moved.stats.device_peak, moved.stats.device_limit);
    EXPECT_TRUE(!offload.params || moved.stats.param_peak <= moved.stats.param_budget);
    EXPECT_LE(moved.stats.host_peak, moved.stats.host_budget);
  });
}

TEST(Offload, EveryRankCountTypeAndSiteHasTheSameBits) {
  for (const int ranks : {1, 2, 4}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      for (const UpdateSite site : {UpdateSite::cpu, UpdateSite::device})
        expect_same(ranks, {.dtype = dtype}, everything(site), std::string(layout::name_of(site)));
    }
  }
}

TEST(Offload, EverySwitchByItself) {
  for (int switches = 1; switches < 8; ++switches) {
    for (const UpdateSite site : {UpdateSite::cpu, UpdateSite::device}) {
      OffloadOptions offload = everything(site);
      offload.params = switches & 1;
      offload.grads = switches & 2;
      offload.optimizer = switches & 4;
      for (const int ranks : {1, 2})
        expect_same(ranks, {.dtype = at::kBFloat16}, offload,
                    "switches " + std::to_string(switches));
    }
  }
}

TEST(Offload, Accumulation) {
  for (int switches = 0; switches < 2; ++switches) {
    OffloadOptions offload = everything();
    offload.grads = switches == 1;
    for (const int ranks : {1, 2, 4})
      expect_same(ranks, {.accumulation = 3, .dtype = at::kBFloat16}, offload, "accumulation");
  }
}

TEST(Offload, GradientsThatAreNotZeroedAddUp) {
  for (int switches = 0; switches < 2; ++switches) {
    OffloadOptions offload = everything();
    offload.grads = switches == 1;
    for (const int ranks : {1, 2})
      expect_same(ranks, {.clip = 0, .zeroes = false}, offload, "sums");
  }
}

TEST(Offload, StrategiesAndBudgets) {
  for (const auto strategy : {OffloadStrategy::conservative, OffloadStrategy::balanced,
                              OffloadStrategy::aggressive, OffloadStrategy::extreme}) {
    for (const int64_t limit : {160 * kKiB, 256 * kKiB, kMiB}) {
      OffloadOptions offload = everything();
      offload.strategy = strategy;
      offload.device_limit = limit;
      offload.param_budget = limit / 2;
      expect_same(1, {}, offload, std::string(layout::name_of(strategy)));
    }
  }
}

TEST(Offload, WithoutOverlapAndPrefetch) {
  OffloadOptions offload = everything();
  offload.overlap = false;
  expect_same(1, {}, offload, "no overlap");
  offload = everything();
  offload.async_prefetch = false;
  expect_same(1, {}, offload, "no async prefetch");
  offload.prefetch = 1;
  expect_same(2, {}, offload, "prefetch 1");
}

TEST(Offload, FlatShards) {
  // One rank without offload has no flat shards: the norm of all gradients is summed by parameter.
  expect_same(1, {.dtype = at::kBFloat16, .clip = 0, .use_orig_params = false}, everything(),
              "flat");
  expect_same(2, {.dtype = at::kBFloat16, .use_orig_params = false}, everything(), "flat");
}

TEST(Offload, UpdatesInBackwardHaveTheBitsOfUnclippedTraining) {
  for (const int ranks : {1, 2}) {
    for (const int accumulation : {1, 3}) {
      for (int switches = 0; switches < 4; ++switches) {
        OffloadOptions offload = everything(switches & 2 ? UpdateSite::cpu : UpdateSite::device);
        offload.grads = switches & 1;
        offload.clip_mode = ClipMode::none;
        expect_same(ranks, {.accumulation = accumulation, .dtype = at::kBFloat16, .clip = 0},
                    offload, "in backward");
      }
    }
  }
}

}  // namespace
}  // namespace lockstep::test
