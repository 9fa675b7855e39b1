// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/integrity/bad_steps.h"

#include <algorithm>
#include <cmath>
#include <sstream>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/log.h"

namespace lockstep::train {
namespace {

constexpr size_t kWindow = 32;     // losses that the median is of
constexpr size_t kEnough = 8;      // before that many are there, no loss is a spike
constexpr int64_t kHopeless = 10;  // steps in a row that were not applied
constexpr int64_t kMostRollbacks = 3;

}  // namespace

std::string BadSteps::state() const {
  std::string text = format("{} {} {}", in_a_row_, rollbacks_, furthest_);
  for (const double loss : accepted_) text += format(" {}", loss);  // reads back to the same bits
  return text;
}

void BadSteps::restore(const std::string& state) {
  std::istringstream words(state);
  words >> in_a_row_ >> rollbacks_ >> furthest_;
  accepted_.clear();
  for (double loss = 0; words >> loss;) accepted_.push_back(loss);
}

double BadSteps::median() const {
  std::vector<double> sorted(accepted_.begin(), accepted_.end());
  const auto middle = sorted.begin() + static_cast<int64_t>(sorted.size() / 2);
  std::nth_element(sorted.begin(), middle, sorted.end());
  return *middle;
}

bool BadSteps::is_spike(double loss) const {
  return accepted_.size() >= kEnough && !(loss <= config_.spike_factor * median());
}

bool BadSteps::must_roll_back(const Step& step) {
  if (!is_bad(step)) {
    if (std::isfinite(step.loss)) accepted_.push_back(step.loss);
    if (accepted_.size() > kWindow) accepted_.pop_front();
    in_a_row_ = 0;
    if (step.step > furthest_) rollbacks_ = 0;
    return false;
  }
  ++in_a_row_;
  const std::string what =
      step.nonfinite
          ? format("step {}: the gradients are not finite, because of {}", step.step, step.cause)
          : format(
                "step {}: loss {:.4g} exceeds train.spike_factor {:.4g} times {:.4g}, "
                "the median of the last {} losses",
                step.step, step.loss, config_.spike_factor, median(), accepted_.size());
  const auto is = [&](config::OnNonfinite nonfinite, config::OnSpike spike) {
    return step.nonfinite ? config_.on_nonfinite == nonfinite : config_.on_spike == spike;
  };
  if (is(config::OnNonfinite::stop, config::OnSpike::stop)) {
    throw Error(format("{}; train.{} is stop: resume from a checkpoint", what,
                       step.nonfinite ? "on_nonfinite" : "on_spike"));
  }
  if (is(config::OnNonfinite::rollback, config::OnSpike::rollback)) {
    furthest_ = std::max(furthest_, step.step);
    if (++rollbacks_ > kMostRollbacks) {
      throw Error(format("{}; the run was rolled back {} times and did not get past step {}", what,
                         kMostRollbacks, furthest_));
    }
    if (speaks_) log::warn(what);
    in_a_row_ = 0;
    return true;
  }
  const bool applied = is({}, config::OnSpike::warn) && !step.nonfinite;
  if (speaks_) log::warn(format("{}{}", what, applied ? "" : "; the step is skipped"));
  if (!applied && in_a_row_ == kHopeless) {
    throw Error(
        format("the {} of the last {} steps were {}, the last at step {}{}; resume from an older "
               "checkpoint in another checkpoint.dir with a lower optim.lr",
               step.nonfinite ? "gradients" : "losses", kHopeless,
               step.nonfinite ? "not finite" : "spikes", step.step,
               step.nonfinite ? format(" because of {}", step.cause) : ""));
  }
  // A level that stays is no spike: from here on the median is of new losses.
  if (applied && in_a_row_ == static_cast<int64_t>(kWindow)) accepted_.clear();
  return false;
}

}  // namespace lockstep::train
