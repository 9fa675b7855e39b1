// SPDX-License-Identifier: Apache-2.0
// Learning rates as functions of the step. Without torch.
#pragma once

#include <cstdint>
#include <string_view>

namespace lockstep::optim {

// After the warm-up:
//   constant  stays
//   linear    falls in a straight line
//   cosine    falls in half a cosine wave
//   wsd       stays (warm-up, stable, decay), and falls in a straight line at the end
enum class ScheduleKind { constant, linear, cosine, wsd };

std::string_view name_of(ScheduleKind kind);
ScheduleKind parse_schedule(std::string_view name);

struct ScheduleOptions {
  double lr = 1e-3;          // the highest
  int64_t warmup_steps = 0;  // step i of them has (i + 1) / warmup_steps of it
  // The three below are for kinds that fall. From total_steps on the rate is min_ratio * lr.
  int64_t total_steps = 0;
  // How many steps before total_steps the fall begins. 0: at the end of the warm-up; wsd must give
  // it.
  int64_t decay_steps = 0;
  double min_ratio = 0;
};

// A value. Steps count from 0.
class LrSchedule {
 public:
  // Throws ConfigError for options that do not fit together.
  explicit LrSchedule(ScheduleKind kind, ScheduleOptions options = {});

  double lr(int64_t step) const { return options_.lr * factor(step); }
  double factor(int64_t step) const;

 private:
  ScheduleKind kind_;
  ScheduleOptions options_;
};

}  // namespace lockstep::optim
