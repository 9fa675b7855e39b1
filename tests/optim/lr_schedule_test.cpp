// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optim/lr_schedule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "lockstep/core/error.h"
#include "tests/support/says.h"

namespace lockstep::optim {
namespace {

std::vector<double> rates(const LrSchedule& schedule, std::vector<int64_t> steps) {
  std::vector<double> values;
  for (const int64_t step : steps) values.push_back(schedule.lr(step));
  return values;
}
using Rates = std::vector<double>;
using test::says;

TEST(LrSchedule, Constant) {
  const LrSchedule schedule(ScheduleKind::constant, {.lr = 8, .warmup_steps = 4});
  EXPECT_EQ(rates(schedule, {0, 1, 2, 3, 4, 1000000}), (Rates{2, 4, 6, 8, 8, 8}));
}

TEST(LrSchedule, Linear) {
  const LrSchedule schedule(ScheduleKind::linear,
                            {.lr = 8, .warmup_steps = 2, .total_steps = 10, .min_ratio = 0.5});
  EXPECT_EQ(rates(schedule, {0, 1, 2, 3, 6, 9, 10, 11}), (Rates{4, 8, 8, 7.5, 6, 4.5, 4, 4}));
}

TEST(LrSchedule, Cosine) {
  const LrSchedule schedule(ScheduleKind::cosine,
                            {.lr = 2, .warmup_steps = 10, .total_steps = 110, .min_ratio = 0.1});
  EXPECT_DOUBLE_EQ(schedule.lr(0), 0.2);
  EXPECT_DOUBLE_EQ(schedule.lr(10), 2);
  EXPECT_DOUBLE_EQ(schedule.lr(35), 2 * (0.1 + 0.9 * 0.5 * (1 + std::sqrt(0.5))));
  EXPECT_DOUBLE_EQ(schedule.lr(60), 2 * 0.55);
  EXPECT_DOUBLE_EQ(schedule.lr(110), 0.2);
  EXPECT_DOUBLE_EQ(schedule.lr(1000), 0.2);
}

TEST(LrSchedule, WarmUpStableDecay) {
  const LrSchedule schedule(ScheduleKind::wsd,
                            {.lr = 1, .warmup_steps = 2, .total_steps = 20, .decay_steps = 4});
  EXPECT_EQ(rates(schedule, {0, 1, 2, 15, 16, 17, 19, 20, 30}),
            (Rates{0.5, 1, 1, 1, 1, 0.75, 0.25, 0, 0}));
}

TEST(LrSchedule, FactorDoesNotKnowTheRate) {
  const LrSchedule schedule(ScheduleKind::linear, {.lr = 3, .total_steps = 4});
  EXPECT_EQ(schedule.factor(1), 0.75);
  EXPECT_EQ(schedule.lr(1), 2.25);
}

TEST(LrSchedule, Names) {
  for (const auto kind :
       {ScheduleKind::constant, ScheduleKind::linear, ScheduleKind::cosine, ScheduleKind::wsd}) {
    EXPECT_EQ(parse_schedule(name_of(kind)), kind);
  }
  EXPECT_EQ(name_of(ScheduleKind::wsd), "wsd");
}

void expect_config_error(const std::string& message, ScheduleKind kind, ScheduleOptions options) {
  try {
    LrSchedule schedule(kind, options);
    ADD_FAILURE() << "no error; expected: " << message;
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), says(message));
  }
}

TEST(LrSchedule, BadInputIsNamed) {
  try {
    parse_schedule("step");
    ADD_FAILURE();
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), says("[schedule] ... 'step' ... constant, linear, cosine, wsd"));
  }
  expect_config_error("[schedule] ... lr is -1 ... at least 0", ScheduleKind::constant, {.lr = -1});
  expect_config_error("[schedule] ... warmup_steps is -1 ... at least 0", ScheduleKind::constant,
                      {.warmup_steps = -1});
  expect_config_error("[schedule] total_steps is 5, must be above 5 warm-up steps",
                      ScheduleKind::linear, {.warmup_steps = 5, .total_steps = 5});
  expect_config_error("[schedule] min_ratio is 1.5, must be in [0, 1]", ScheduleKind::cosine,
                      {.total_steps = 5, .min_ratio = 1.5});
  expect_config_error("[schedule] ... decay_steps is 0 ... at least 1 ... at most 8",
                      ScheduleKind::wsd, {.warmup_steps = 2, .total_steps = 10});
  expect_config_error("[schedule] ... decay_steps is 9 ... at least 0 ... at most 8",
                      ScheduleKind::cosine,
                      {.warmup_steps = 2, .total_steps = 10, .decay_steps = 9});
}

}  // namespace
}  // namespace lockstep::optim
