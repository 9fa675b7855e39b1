// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/schedule_trace.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/input_file.h"
#include "lockstep/io/json.h"
#include "lockstep/report/trace.h"
#include "lockstep/schedule/render/render.h"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;
constexpr uint64_t kMostBytes = uint64_t{4} << 30;
using schedule::Action;
using schedule::Interval;
using schedule::Op;

struct Event {
  Action action;
  int stage = 0;
  Interval time;  // microseconds
};
using Ranks = std::map<int, std::vector<Event>>;  // by pipeline rank
// By step, and by the trace's process: ranks of other axes have the same place in the pipeline.
using Steps = std::map<int64_t, std::map<int, Ranks>>;

bool is_computation_name(const std::string& name) {
  return name.size() > 1 && std::string_view("FBIW").find(name[0]) != std::string_view::npos &&
         name[1] >= '0' && name[1] <= '9';
}

// One event a line, as core/trace writes them; the last line of a process that was killed may be
// cut.
void read_trace(const fs::path& path, Steps& steps, int& replicas) {
  std::istringstream file(read_text(path.string(), kMostBytes));
  for (std::string line; std::getline(file, line);) {
    if (line.find("\"cat\":\"pipeline\"") == std::string::npos) continue;
    const auto end = line.find_last_of('}');
    const auto json = io::parse_json_line(line.substr(0, end + 1));
    if (json.is_discarded()) continue;
    try {
      const std::string name = json.at("name");
      const auto& args = json.at("args");
      const int replica = args.value("dp", 0);
      replicas = std::max(replicas, replica + 1);
      if (!is_computation_name(name) || replica != 0) continue;
      const double start = json.at("ts");
      const double duration = json.at("dur");
      steps[args.at("step")][json.at("pid")][args.at("rank")].push_back(
          {schedule::parse_action(name, std::numeric_limits<int>::max()),
           args.at("stage"),
           {start, start + duration}});
    } catch (const nlohmann::json::exception& error) {
      throw ConfigError(format("schedule: {}: {}: {}", path.string(), line, error.what()));
    }
  }
}

// The first process of each place.
Ranks first_of(const std::map<int, Ranks>& processes) {
  Ranks ranks;
  for (const auto& [process, its] : processes) {
    for (const auto& [rank, events] : its) ranks.try_emplace(rank, events);
  }
  return ranks;
}

MeasuredStep measured(int64_t number, Ranks ranks) {
  MeasuredStep result{.step = number};
  auto& schedule = result.schedule;
  schedule.kind = schedule::Kind::file;
  schedule.ranks = ranks.rbegin()->first + 1;
  double first = std::numeric_limits<double>::max();
  bool loop = true;
  for (const auto& [rank, events] : ranks) {
    for (const Event& event : events) {
      first = std::min(first, event.time.start);
      schedule.microbatches = std::max(schedule.microbatches, event.action.microbatch + 1);
      schedule.chunks = std::max(schedule.chunks, event.action.chunk + 1);
      loop = loop && event.stage == event.action.chunk * schedule.ranks + rank;
    }
  }
  schedule.order = loop ? schedule::StageOrder::loop : schedule::StageOrder::v;
  std::vector<std::vector<Interval>> times;
  for (int rank = 0; rank < schedule.ranks; ++rank) {
    auto& events = ranks[rank];
    std::stable_sort(events.begin(), events.end(),
                     [](const Event& a, const Event& b) { return a.time.start < b.time.start; });
    schedule.actions.emplace_back();
    times.emplace_back();
    for (const Event& event : events) {
      schedule.actions.back().push_back(event.action);
      times.back().push_back({(event.time.start - first) / 1e3, (event.time.end - first) / 1e3});
    }
  }
  schedule::validate(schedule);
  result.simulation = schedule::summarize(schedule, std::move(times));
  return result;
}

}  // namespace

MeasuredStep read_step(const std::string& named, std::optional<int64_t> step) {
  if (!fs::is_directory(named)) {
    throw ConfigError(format("schedule: --trace {}: is not a folder", named));
  }
  const fs::path of_run = fs::path(named) / "traces";  // where lockstep train writes them
  const std::string folder = fs::is_directory(of_run) ? of_run.string() : named;
  Steps steps;
  int replicas = 1;
  const auto runs = report::trace_files(folder);
  for (const auto& files : runs) {  // the newest of a pipeline
    for (const std::string& path : files) read_trace(path, steps, replicas);
    if (!steps.empty()) break;
  }
  if (steps.empty()) {
    throw ConfigError(
        format("schedule: {}/*.json have no pipeline events; a run with parallel.pp above 1 writes "
               "them with --metrics.trace auto, a program of your own with LOCKSTEP_TRACE=FOLDER",
               folder));
  }
  if (step && !steps.contains(*step)) {
    throw ConfigError(format("schedule: --step is {}, but the trace has steps {} to {}", *step,
                             steps.begin()->first, steps.rbegin()->first));
  }
  std::string why;
  for (auto found = steps.rbegin(); found != steps.rend(); ++found) {
    if (step && found->first != *step) continue;
    try {
      MeasuredStep result = measured(found->first, first_of(found->second));
      result.runs = runs.size();
      result.replicas = replicas;
      return result;
    } catch (const ConfigError& error) {
      if (why.empty()) why = error.what();
    }
  }
  throw ConfigError(format("schedule: {}: {}: {}", folder,
                           step ? format("step {} is not complete", *step) : "no step is complete",
                           why));
}

std::string to_text(const MeasuredStep& measured) {
  const auto& [step, schedule, simulation, runs, replicas] = measured;
  constexpr std::array<const char*, 4> kOps = {"F", "B", "I", "W"};
  struct Sum {
    double time = 0;
    int count = 0;
  };
  std::vector<std::array<Sum, 4>> sums(static_cast<size_t>(schedule.ranks));
  std::array<bool, 4> used{};
  for (int rank = 0; rank < schedule.ranks; ++rank) {
    for (size_t i = 0; i < schedule.actions[rank].size(); ++i) {
      const auto op = static_cast<size_t>(schedule.actions[rank][i].op);
      const auto& [start, end] = simulation.times[rank][i];
      sums[rank][op].time += end - start;
      ++sums[rank][op].count;
      used[op] = true;
    }
  }
  std::string text = format("step {} as measured{}: {}{}; times in ms\n", step,
                            runs > 1 ? format(" in the newest of {} runs", runs) : "",
                            replicas > 1 ? format("data-parallel replica 0 of {}, ", replicas) : "",
                            describe(schedule));
  text += "rank";
  for (size_t op = 0; op < kOps.size(); ++op) {
    if (used[op]) text += format("  mean {}", kOps[op]);
  }
  text += "      span  peak live\n";
  for (int rank = 0; rank < schedule.ranks; ++rank) {
    text += format("{:4}", rank);
    for (size_t op = 0; op < kOps.size(); ++op) {
      const auto& [time, count] = sums[rank][op];
      if (used[op]) text += count == 0 ? format("{:>8}", "-") : format("{:8.3f}", time / count);
    }
    text += format("{:10.3f}{:11}\n", simulation.span[rank], simulation.peak_live[rank]);
  }
  text += format("makespan {:.3f}\n", simulation.makespan);
  text += format("bubble {:.6f} of the makespan, {:.6f} of the longest span\n",
                 simulation.bubble_makespan, simulation.bubble_span);
  return text;
}

}  // namespace lockstep::cli
