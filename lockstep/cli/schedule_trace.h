// SPDX-License-Identifier: Apache-2.0
// What a run's trace says about its pipeline.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "lockstep/schedule/schedule.h"
#include "lockstep/schedule/simulate.h"

namespace lockstep::cli {

struct MeasuredStep {
  int64_t step = 0;
  schedule::Schedule schedule = {};      // its kind is file: a trace does not tell
  schedule::Simulation simulation = {};  // milliseconds
  size_t runs = 1;                       // in the folder
  int replicas = 1;                      // of data parallelism, of which this is number 0
};

// Reads the pipeline's computations of data-parallel replica 0 from the traces of the newest run in
// the folder `named`, or in its folder traces/; without `step`, those of the last step that is
// complete. Throws ConfigError if there is none.
MeasuredStep read_step(const std::string& named, std::optional<int64_t> step);

// Means per rank and op, and the numbers of the whole step.
std::string to_text(const MeasuredStep& measured);

}  // namespace lockstep::cli
