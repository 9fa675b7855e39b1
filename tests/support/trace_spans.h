// SPDX-License-Identifier: Apache-2.0
// What a trace tells: which spans a rank had, and whether two of them overlap.
#pragma once

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/support/subprocess.h"

namespace lockstep::test {

struct TraceSpan {
  double start, end;
  int64_t bytes = 0;  // of an operation
};

inline bool overlap(const TraceSpan& a, const TraceSpan& b) {
  return std::max(a.start, b.start) < std::min(a.end, b.end);
}

// With a tag, operations that have it.
inline std::vector<TraceSpan> spans(const nlohmann::json& events, int rank, const std::string& name,
                                    const std::string& tag = {}) {
  std::vector<TraceSpan> found;
  for (const auto& event : events) {
    if (event["ph"] != "X" || event["name"] != name || event["pid"] != rank) continue;
    if (!tag.empty() && event["args"]["tag"] != tag) continue;
    const double start = event["ts"];
    found.push_back({start, start + event["dur"].get<double>(),
                     tag.empty() ? 0 : event["args"]["bytes"].get<int64_t>()});
  }
  return found;
}

inline nlohmann::json read_trace(const std::string& folder) {
  auto events = nlohmann::json::array();
  for (const auto& file : std::filesystem::directory_iterator(folder)) {
    for (auto& event : nlohmann::json::parse(read_file(file.path()))) events.push_back(event);
  }
  return events;
}

}  // namespace lockstep::test
