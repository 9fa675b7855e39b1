// SPDX-License-Identifier: Apache-2.0
#include "lockstep/report/csv.h"

#include <cmath>
#include <fstream>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/report/metrics_line.h"

namespace lockstep::report {

int64_t write_csv(const std::string& metrics_file, std::ostream& out) {
  std::ifstream file(metrics_file);
  if (!file) throw ConfigError(format("report: cannot read {}", metrics_file));
  for (const std::string_view name : kColumnNames) out << name << ',';
  for (const std::string_view name : kSplitNames) out << name << "_ms,";
  out << "validation_loss\n";
  int64_t steps = 0;
  MetricsLine parsed;
  const auto number = [](double value) {
    return std::isfinite(value) ? format("{}", value) : std::string();
  };
  for (std::string line; std::getline(file, line);) {
    if (!parsed.parse(line) || !(parsed.has_loss || parsed.is_validation)) continue;
    for (const double value : parsed.values) out << number(value) << ',';
    out << number(parsed.validation_loss) << '\n';
    ++steps;
  }
  return steps;
}

}  // namespace lockstep::report
