// SPDX-License-Identifier: Apache-2.0
// Faults on purpose, for tests of what a run does about them: LOCKSTEP_FAULT. CONTRIBUTING.md has
// the form. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/slices.h"
#include "lockstep/parallel/pipeline/pipeline.h"

namespace lockstep::train {

struct Fault {
  enum class Action { kill, stop, exit, sleep, raise, nan, scale, nan_grad, flip };

  int64_t rank = 0, step = 0;  // steps count from 1
  bool each_start = false;     // also after a restart of the job
  std::string once = {};       // a file that must not exist and is then made: once in all restarts
  Action action = Action::kill;
  double number = 0;      // the exit code, the seconds to sleep, the factor of the loss
  std::string name = {};  // of a parameter, for flip also of optimizer state as checkpoints name it
  int64_t element = 0, bit = 0;  // of this rank's slice
};

// "rank=2,step=7,action=nan", several separated by ";", each with "start=each", "once=FILE" or only
// at the first start of the job. ConfigError for anything else.
std::vector<Fault> parse_faults(std::string_view text);

// The faults of one rank. Each happens once, also where its step is done again.
class FaultInjection {
 public:
  // What LOCKSTEP_FAULT says; nothing where it is not set. ConfigError where it is wrong.
  FaultInjection(int rank, int world);
  explicit FaultInjection(std::vector<Fault> faults) : faults_(std::move(faults)) {}

  // Before the forward of a step: ends, stops or delays the process, or throws, or lets the step's
  // gradient of a parameter be NaN. Returns what the loss is to be multiplied by.
  double begin_step(int64_t step, const parallel::Pipeline& model);
  // Whether this step's backward is changed, which one that was recorded would not be.
  bool has_hooks() const { return !hooks_.empty(); }
  // After the update of a step: flips bits.
  void end_step(int64_t step, const std::function<std::vector<checkpoint::NamedSlice>()>& slices);

 private:
  std::vector<Fault> take(int64_t step, bool flips);
  void poison(const Fault& fault, const parallel::Pipeline& model);

  std::vector<Fault> faults_;  // that are still to come
  std::vector<std::pair<at::Tensor, unsigned>> hooks_;
};

}  // namespace lockstep::train
