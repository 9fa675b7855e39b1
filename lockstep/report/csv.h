// SPDX-License-Identifier: Apache-2.0
// Metrics as a table for other programs.
#pragma once

#include <ostream>
#include <string>

namespace lockstep::report {

// A line for each step of metrics.jsonl, and one of names before them. Values that a line does not
// have are empty. Returns the number of steps. ConfigError where the file cannot be read.
int64_t write_csv(const std::string& metrics_file, std::ostream& out);

}  // namespace lockstep::report
