// SPDX-License-Identifier: Apache-2.0
// One JSON object for each step.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/io/line_file.h"
#include "lockstep/train/observe/step_clock.h"

namespace lockstep::train {

struct StepMetrics {
  int64_t step = 0;      // counted from 1
  double loss = 0;       // mean over all targets of the global batch that count
  double grad_norm = 0;  // before clipping
  double lr = 0;
  double tokens_per_s = 0;
  double step_ms = 0;
  double comm_ms = 0;  // that this rank waited for communication
  int64_t peak_bytes = 0;
  bool skipped = false;              // gradients not finite, or a loss spike: no rank stepped
  double time = 0;                   // when it ended, in seconds since 1970
  int64_t tokens = 0;                // that the run has seen
  StepSplit split = {};              // of rank 0
  std::vector<double> busy_ms = {};  // of each rank: its time without waiting for others
  std::vector<int64_t> rank_peak_bytes = {};  // of each rank
};

// Appends lines to a file (io::LineFile). Numbers that JSON does not have become null. Without a
// path it does nothing.
class MetricsFile {
 public:
  // Lines of steps after `last_step`, which a run that is resumed does again, are dropped; at step
  // 0 the file starts empty. ConfigError where it cannot be written.
  MetricsFile(const std::string& path, int64_t last_step);

  void write(const StepMetrics& metrics);
  void write_evaluation(int64_t step, double loss, double time);

 private:
  io::LineFile file_;
};

double seconds_since_1970();

// The most memory that this process has had: the device's allocator's where there is one, else the
// system's count of resident bytes.
int64_t peak_bytes(c10::Device device);

}  // namespace lockstep::train
