// SPDX-License-Identifier: Apache-2.0
#include "lockstep/memory/budget.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/says.h"

namespace lockstep::memory {
namespace {

using Share = Budget::Share;
using test::says;
using testing::ThrowsMessage;

constexpr size_t kMega = size_t{1} << 20;

TEST(Budget, MayBeExceededAndExtended) {
  const Budget budget("offload.host_budget", 100);
  auto most = budget.take(90, "state");
  auto over = budget.take_over(30);
  EXPECT_EQ(budget.used(), 120u);
  EXPECT_FALSE(budget.fits(1));
  EXPECT_THROW((void)budget.take(1, "more"), OverBudget);
  most = {};
  EXPECT_TRUE(budget.fits(70));
  EXPECT_FALSE(budget.fits(71));
  budget.extend(10);
  EXPECT_EQ(budget.limit(), 110u);
  EXPECT_TRUE(budget.fits(80));
  EXPECT_EQ(budget.peak(), 120u);
}

TEST(Budget, CountsWhatIsHeld) {
  const Budget budget("offload.host_budget", 100);
  {
    const Share a = budget.take(60, "a"), b = budget.take(40, "b");
    EXPECT_EQ(a.bytes(), 60U);
    EXPECT_EQ(budget.used(), 100U);
    EXPECT_EQ(budget.pressure(), 1.0);
    EXPECT_TRUE(budget.fits(0));
    EXPECT_FALSE(budget.fits(1));
  }
  EXPECT_EQ(budget.used(), 0U);
  EXPECT_EQ(budget.peak(), 100U);
  EXPECT_TRUE(budget.fits(100));
  EXPECT_FALSE(budget.fits(101));
}

TEST(Budget, SaysWhatDoesNotFitAndWhy) {
  const Budget budget("offload.host_budget", 1024 * kMega);
  const Share most = budget.take(1000 * kMega, "parameters");
  EXPECT_THAT(
      [&] { static_cast<void>(budget.take(512 * kMega, "optimizer state of blocks.3")); },
      ThrowsMessage<OverBudget>(says(
          "[offload.host_budget] ... 512 MB ... optimizer state of blocks.3 ... 0.98 GB of 1 GB")));
  EXPECT_EQ(budget.used(), 1000 * kMega);  // nothing of it is held
  EXPECT_NO_THROW(static_cast<void>(budget.take(24 * kMega, "the rest")));
  // No sum of sizes is too large to be seen as too large.
  EXPECT_THROW(static_cast<void>(budget.take(std::numeric_limits<size_t>::max(), "x")), OverBudget);
}

TEST(Budget, WithoutALimitOnlyCounts) {
  const Budget budget("memory", 0);
  const Share share = budget.take(size_t{1} << 50, "much");
  EXPECT_EQ(budget.used(), size_t{1} << 50);
  EXPECT_EQ(budget.limit(), 0U);
  EXPECT_EQ(budget.pressure(), 0.0);
}

TEST(Budget, CopiesShareTheBooks) {
  const Budget budget("memory", 10);
  const Budget copy = budget;
  const Share share = copy.take(7, "x");
  EXPECT_EQ(budget.used(), 7U);
  EXPECT_FALSE(budget.fits(4));
}

TEST(Budget, SharesMoveAndMayOutliveTheBudget) {
  Share kept;
  {
    const Budget budget("memory", 10);
    Share a = budget.take(3, "a"), b = budget.take(4, "b");
    kept = std::move(a);
    EXPECT_EQ(budget.used(), 7U);
    EXPECT_EQ(a.bytes(), 0U);  // NOLINT: moved from means empty
    kept = std::move(b);       // what it held goes at once
    EXPECT_EQ(budget.used(), 4U);
    EXPECT_EQ(kept.bytes(), 4U);
    kept = Share();
    EXPECT_EQ(budget.used(), 0U);
    kept = budget.take(5, "c");
  }
  EXPECT_EQ(kept.bytes(), 5U);
}

TEST(Budget, ManyThreadsNeverExceedIt) {
  const Budget budget("memory", 1000);
  std::vector<std::jthread> threads;
  for (int t = 0; t < 6; ++t) {
    threads.emplace_back([&budget, t] {
      std::vector<Share> held;
      for (size_t i = 0; i < 5000; ++i) {
        const size_t bytes = 50 + (i * 7 + static_cast<size_t>(t) * 31) % 200;
        try {
          held.push_back(budget.take(bytes, "x"));
        } catch (const OverBudget&) {
          held.clear();
        }
      }
    });
  }
  threads.clear();
  EXPECT_EQ(budget.used(), 0U);
  EXPECT_LE(budget.peak(), 1000U);
  EXPECT_GT(budget.peak(), 700U);
}

}  // namespace
}  // namespace lockstep::memory
