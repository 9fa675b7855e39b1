// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <vector>

#include "lockstep/core/error.h"

namespace lockstep::data {
namespace {

std::vector<int64_t> epoch_of(const Sampler& sampler, int64_t epoch) {
  std::vector<int64_t> order;
  for (int64_t i = 0; i < sampler.samples(); ++i) {
    order.push_back(sampler(epoch * sampler.samples() + i));
  }
  return order;
}

TEST(Sampler, EveryEpochVisitsEachSampleOnce) {
  std::vector<int64_t> sizes(130);
  std::iota(sizes.begin(), sizes.end(), 1);
  sizes.insert(sizes.end(), {251, 256, 257, 1000, 1009, 4095, 4096, 4097, 65521, 65536, 99991});
  for (const int64_t samples : sizes) {
    const Sampler sampler(samples, 7);
    for (const int64_t epoch : {0, 1, 5}) {
      auto order = epoch_of(sampler, epoch);
      std::sort(order.begin(), order.end());
      for (int64_t i = 0; i < samples; ++i) {
        ASSERT_EQ(order[static_cast<size_t>(i)], i) << samples << " samples, epoch " << epoch;
      }
    }
  }
}

TEST(Sampler, SeedsAndEpochsHaveTheirOwnOrders) {
  const Sampler sampler(1000, 1);
  EXPECT_EQ(epoch_of(sampler, 0), epoch_of(Sampler(1000, 1), 0));
  EXPECT_NE(epoch_of(sampler, 0), epoch_of(sampler, 1));
  EXPECT_NE(epoch_of(sampler, 0), epoch_of(Sampler(1000, 2), 0));
}

// Where a sample comes in an epoch is uniform: 7 x 7 counts of 2000 +- 41, four fifths of a percent
// of chances in all to be 5 deviations off; the numbers are fixed, so it is no chance at all.
TEST(Sampler, PlacesAreUniform) {
  constexpr int64_t kSamples = 7, kEpochs = 14'000;
  const Sampler sampler(kSamples, 3);
  std::vector<int64_t> counts(kSamples * kSamples);
  for (int64_t epoch = 0; epoch < kEpochs; ++epoch) {
    for (int64_t i = 0; i < kSamples; ++i) {
      ++counts[static_cast<size_t>(i * kSamples + sampler(epoch * kSamples + i))];
    }
  }
  const double mean = double{kEpochs} / kSamples;
  for (const int64_t count : counts) EXPECT_NEAR(count, mean, 5 * std::sqrt(mean * 6 / 7));
}

// Not only the places: each of the 120 orders of 5 samples comes as often as the others.
TEST(Sampler, OrdersAreUniform) {
  constexpr int64_t kSamples = 5, kEpochs = 24'000;
  const Sampler sampler(kSamples, 9);
  std::map<std::vector<int64_t>, int64_t> counts;
  for (int64_t epoch = 0; epoch < kEpochs; ++epoch) ++counts[epoch_of(sampler, epoch)];
  ASSERT_EQ(counts.size(), 120u);
  double chi_squared = 0;
  for (const auto& [order, count] : counts) {
    const auto excess = static_cast<double>(count) - 200;
    chi_squared += excess * excess / 200;
  }
  EXPECT_NEAR(chi_squared, 119, 77);  // five deviations
}

// Neighbours in the order are no neighbours in the data.
TEST(Sampler, NeighboursAreUnrelated) {
  constexpr int64_t kSamples = 10'000;
  const auto order = epoch_of(Sampler(kSamples, 11), 0);
  double sum = 0;
  int64_t near = 0, rises = 0;
  for (size_t i = 1; i < order.size(); ++i) {
    sum += static_cast<double>(std::abs(order[i] - order[i - 1]));
    near += std::abs(order[i] - order[i - 1]) <= 100;
    rises += order[i] > order[i - 1];
  }
  EXPECT_NEAR(sum / kSamples, kSamples / 3.0, 120);  // deviation 24
  EXPECT_NEAR(static_cast<double>(near), 200, 75);   // 14
  EXPECT_NEAR(static_cast<double>(rises), 5000, 150);
}

// The order is part of what a run means: it may not change between releases or machines.
TEST(Sampler, TheOrderIsFixed) {
  EXPECT_EQ(epoch_of(Sampler(10, 42), 0), (std::vector<int64_t>{2, 4, 5, 7, 0, 1, 6, 8, 9, 3}));
  EXPECT_EQ(epoch_of(Sampler(10, 42), 3), (std::vector<int64_t>{3, 0, 7, 2, 8, 4, 5, 1, 9, 6}));
  EXPECT_EQ(Sampler(int64_t{1} << 60, 42)(123456789), 130437128350030212);
}

TEST(Sampler, RejectsBadSizesAndPositions) {
  EXPECT_THROW(Sampler(0, 1), ConfigError);
  EXPECT_THROW(Sampler(-3, 1), ConfigError);
  EXPECT_THROW(Sampler(int64_t{1} << 61, 1), ConfigError);
  EXPECT_THROW(Sampler(3, 1)(-1), ConfigError);
  EXPECT_NO_THROW(Sampler(1, 1)(UINT32_MAX));
  EXPECT_THROW(Sampler(1, 1)(int64_t{UINT32_MAX} + 1), ConfigError);
}

TEST(WindowCount, HasATargetForEachInput) {
  for (int64_t length = 1; length < 9; ++length) {
    for (int64_t tokens = 0; tokens < 40; ++tokens) {
      const int64_t count = window_count(tokens, length);
      EXPECT_LE(count * length + 1, std::max<int64_t>(tokens, 1));
      EXPECT_GT((count + 1) * length + 1, tokens);
    }
  }
  EXPECT_EQ(window_count(0, 4), 0);
  EXPECT_THROW(window_count(10, 0), ConfigError);
}

}  // namespace
}  // namespace lockstep::data
