// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/plan/run_metrics.h"

#include <algorithm>
#include <filesystem>
#include <sstream>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/input_file.h"
#include "lockstep/core/require.h"
#include "lockstep/io/json.h"

namespace lockstep::config {
namespace {

constexpr size_t kUncounted = 3;  // steps: memory is allocated and kernels are chosen in them
constexpr uint64_t kMostMetrics = uint64_t{1} << 30;

double middle_of(std::vector<double>& values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

std::vector<io::Json> lines_of(const std::string& path) {
  std::istringstream text(read_text(path, kMostMetrics));
  std::vector<io::Json> lines;
  for (std::string line; std::getline(text, line);) {
    io::Json parsed = io::parse_json_line(line);
    if (parsed.is_object()) lines.push_back(std::move(parsed));
  }
  return lines;
}

// When the ranks were last started, in seconds since 1970: earlier steps may be of other layouts.
double last_start(const std::string& run_folder) {
  const std::string path = run_folder + "/events.jsonl";
  double time = 0;
  if (!std::filesystem::exists(path)) return time;
  for (const io::Json& line : lines_of(path)) {
    if (line.value("event", io::Json()) == "started" && line.contains("time") &&
        line["time"].is_number())
      time = line["time"].get<double>();
  }
  return time;
}

}  // namespace

MeasuredStep measured_step(const std::string& run_folder) {
  const std::string path = run_folder + "/metrics.jsonl";
  std::vector<double> times;
  std::map<std::string, std::vector<double>> parts;
  size_t seen = 0;
  const double start = last_start(run_folder);
  for (const io::Json& line : lines_of(path)) {
    if (!line.contains("step_ms") || !line["step_ms"].is_number()) continue;
    if (line.contains("time") && line["time"].is_number() && line["time"].get<double>() < start)
      continue;
    if (++seen <= kUncounted) continue;
    times.push_back(line["step_ms"].get<double>());
    if (!line.contains("split") || !line["split"].is_object()) continue;
    for (const auto& [name, value] : line["split"].items()) {
      if (value.is_number()) parts[name].push_back(value.get<double>());
    }
  }
  require(times.size() >= 2,
          format("{} has {} steps, must have at least {}: the first {} do not count", path, seen,
                 kUncounted + 2, kUncounted));
  MeasuredStep step{.seconds = middle_of(times) / 1e3, .steps = static_cast<int>(times.size())};
  for (auto& [name, values] : parts) step.split_ms[name] = middle_of(values);
  return step;
}

int ranks_of_run(const std::string& run_folder) {
  const std::string path = run_folder + "/environment.jsonl";
  int ranks = 0;
  for (const io::Json& line : lines_of(path)) {
    if (line.contains("world_size") && line["world_size"].is_number_integer())
      ranks = line["world_size"].get<int>();
  }
  require(ranks > 0, format("{} has no world_size", path));
  return ranks;
}

}  // namespace lockstep::config
