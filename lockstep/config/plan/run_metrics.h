// SPDX-License-Identifier: Apache-2.0
// How long the steps of a run took, from its folder. Private: not installed.
#pragma once

#include <map>
#include <string>

namespace lockstep::config {

struct MeasuredStep {
  double seconds = 0;  // the median of the steps of the last start, after its first three
  int steps = 0;       // that count
  // Medians of the parts that metrics.jsonl has under "split", by their names; empty: it has none.
  std::map<std::string, double> split_ms = {};
};

// Reads metrics.jsonl. ConfigError where it has fewer than two steps that count.
MeasuredStep measured_step(const std::string& run_folder);
// The number of ranks of the last start, from environment.jsonl; ConfigError where it has none.
int ranks_of_run(const std::string& run_folder);

}  // namespace lockstep::config
