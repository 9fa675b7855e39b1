// SPDX-License-Identifier: Apache-2.0
#include "lockstep/report/series.h"

#include <gtest/gtest.h>

#include <cmath>

namespace lockstep::report {
namespace {

TEST(Series, KeepsEveryStepWhileThereIsRoom) {
  Series series(2, 8);
  for (int i = 0; i < 8; ++i)
    series.add(std::array{1.0 * i, i == 3 ? kNone : 10.0 * i + 0.123456789});
  const auto rows = series.rows();
  ASSERT_EQ(rows.size(), 8u);
  EXPECT_EQ(rows[5][0], 5);
  EXPECT_EQ(rows[5][1], 50.123456789);  // all digits
  EXPECT_TRUE(std::isnan(rows[3][1]));
  EXPECT_EQ(series.count(), 8);
}

// A million steps with one spike up and one down, each in one step.
TEST(Series, KeepsExtremesInBoundedMemory) {
  Series series(2, 64);
  for (int i = 0; i < 1'000'000; ++i) {
    const double value = i == 123'456 ? 99 : i == 777'777 ? -99 : std::sin(i);
    series.add(std::array{1.0 * i, value});
  }
  const auto rows = series.rows();
  EXPECT_LE(rows.size(), 128u);
  EXPECT_GE(rows.size(), 64u);
  double high = 0, low = 0, high_at = 0, low_at = 0, last = -1;
  for (const auto& row : rows) {
    EXPECT_GE(row[0], last);  // steps ascend
    last = row[0];
    if (row[1] > high) high = row[1], high_at = row[0];
    if (row[1] < low) low = row[1], low_at = row[0];
  }
  EXPECT_EQ(high, 99);
  EXPECT_EQ(low, -99);
  const double width = 1'000'000.0 / 32;
  EXPECT_NEAR(high_at, 123'456, width);
  EXPECT_NEAR(low_at, 777'777, width);
  EXPECT_EQ(series.min(1), -99);
  EXPECT_EQ(series.max(1), 99);
  EXPECT_EQ(series.last(0), 999'999);
}

TEST(Series, KnowsWhichExtremeCameFirst) {
  for (const bool falls : {false, true}) {
    Series series(1, 4);
    for (int i = 0; i < 64; ++i) series.add(std::array{falls ? -1.0 * i : 1.0 * i});
    const auto rows = series.rows();
    for (size_t i = 1; i < rows.size(); ++i) EXPECT_EQ(rows[i][0] < rows[i - 1][0], falls) << i;
  }
}

}  // namespace
}  // namespace lockstep::report
