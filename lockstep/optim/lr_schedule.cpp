// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optim/lr_schedule.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/require.h"
#include "lockstep/layout/enum_names.h"

namespace lockstep::optim {
namespace {

constexpr std::array<std::string_view, 4> kNames = {"constant", "linear", "cosine", "wsd"};

constexpr Requirement require_schedule("schedule");

}  // namespace

std::string_view name_of(ScheduleKind kind) { return layout::enum_name(kNames, kind); }

ScheduleKind parse_schedule(std::string_view name) {
  return layout::parse_enum<ScheduleKind>("schedule", kNames, name);
}

LrSchedule::LrSchedule(ScheduleKind kind, ScheduleOptions options)
    : kind_(kind), options_(options) {
  require_schedule(options.lr >= 0, "lr", options.lr, "at least 0");
  require_schedule(options.warmup_steps >= 0, "warmup_steps", options.warmup_steps, "at least 0");
  if (kind == ScheduleKind::constant) return;
  require_schedule(options.min_ratio >= 0 && options.min_ratio <= 1, "min_ratio", options.min_ratio,
                   "in [0, 1]");
  require_schedule(options.total_steps > options.warmup_steps, "total_steps", options.total_steps,
                   format("above {} warm-up steps", options.warmup_steps));
  const int64_t room = options.total_steps - options.warmup_steps;
  require_schedule(
      options.decay_steps >= (kind == ScheduleKind::wsd ? 1 : 0) && options.decay_steps <= room,
      "decay_steps", options.decay_steps,
      format("at least {} and at most {}, the steps after the warm-up",
             kind == ScheduleKind::wsd ? 1 : 0, room));
  if (options.decay_steps == 0) options_.decay_steps = room;
}

double LrSchedule::factor(int64_t step) const {
  const auto& [lr, warmup, total, decay, min_ratio] = options_;
  if (step < warmup) return static_cast<double>(step + 1) / static_cast<double>(warmup);
  if (kind_ == ScheduleKind::constant) return 1;
  const double progress = std::clamp(
      static_cast<double>(step - (total - decay)) / static_cast<double>(decay), 0.0, 1.0);
  const double left = kind_ == ScheduleKind::cosine
                          ? 0.5 * (1 + std::cos(std::numbers::pi * progress))
                          : 1 - progress;
  return min_ratio + (1 - min_ratio) * left;
}

}  // namespace lockstep::optim
