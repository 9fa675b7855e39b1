// SPDX-License-Identifier: Apache-2.0
// Offloaded training has the bits of training without offload, whatever rests where.
#include <gtest/gtest.h>

#include "tests/parallel/offload/training.h"

namespace lockstep::test {
namespace {

using layout::ClipMode;
using layout::OffloadOptions;
using layout::OffloadStrategy;
using layout::UpdateSite;

TEST(Offload, EveryRankCountTypeAndSiteHasTheSameBits) {
  for (const int ranks : {1, 2, 4}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
      if (ranks == 4 && dtype != at::kFloat && dtype != at::kBFloat16) continue;
      for (const UpdateSite site : {UpdateSite::cpu, UpdateSite::device})
        expect_same(ranks, {.layers = 4 * ranks, .dtype = dtype}, everything(site),
                    std::string(layout::name_of(site)));
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
      expect_same(ranks, {.layers = 4 * ranks, .accumulation = 3, .dtype = at::kBFloat16}, offload,
                  "accumulation");
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
    for (const int64_t limit : {192 * kKiB, 320 * kKiB, kMiB}) {
      OffloadOptions offload = everything();
      offload.advanced.strategy = strategy;
      offload.device_limit = limit;
      offload.param_budget = limit / 2;
      expect_same(1, {}, offload, std::string(layout::name_of(strategy)));
    }
  }
}

TEST(Offload, WithoutOverlapAndPrefetch) {
  OffloadOptions offload = everything();
  offload.advanced.overlap = false;
  expect_same(1, {}, offload, "no overlap");
  offload = everything();
  offload.advanced.async_prefetch = false;
  expect_same(1, {}, offload, "no async prefetch");
  offload.advanced.prefetch = 1;
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
        offload.advanced.clip_mode = ClipMode::none;
        expect_same(ranks, {.accumulation = accumulation, .dtype = at::kBFloat16, .clip = 0},
                    offload, "in backward");
      }
    }
  }
}

}  // namespace
}  // namespace lockstep::test
