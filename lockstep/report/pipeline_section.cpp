// SPDX-License-Identifier: Apache-2.0
// What each pipeline stage computed when, above what a simulation with the same times gives.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/report/markup.h"
#include "lockstep/report/sections.h"
#include "lockstep/schedule/render/render.h"

namespace lockstep::report {
namespace {

using schedule::Action;
using schedule::Interval;
using Times = std::vector<std::vector<Interval>>;

constexpr size_t kMostBars = 320;  // in both pictures

struct Measured {
  schedule::Schedule schedule;
  Times times;  // milliseconds, parallel to the schedule's actions
};

// Json::exception or ConfigError where the event is of another version.
Measured measured_in(const io::Json& event) {
  Measured measured{schedule::from_csv(event.at("schedule").get<std::string>(), "events.jsonl"),
                    {}};
  measured.times.resize(measured.schedule.actions.size());
  int64_t first = std::numeric_limits<int64_t>::max();
  std::vector<std::map<std::string, std::pair<int64_t, int64_t>>> found(measured.times.size());
  for (const io::Json& rank : event.at("ranks")) {
    if (!rank.contains("actions")) continue;
    auto& mine = found.at(rank.value("pp", size_t{0}));
    for (const io::Json& action : rank.at("actions")) {
      mine[action.at(0).get<std::string>()] = {action.at(1).get<int64_t>(),
                                               action.at(2).get<int64_t>()};
      first = std::min(first, action.at(1).get<int64_t>());
    }
  }
  for (size_t rank = 0; rank < found.size(); ++rank) {
    for (const Action& action : measured.schedule.actions[rank]) {
      const auto& [start, end] = found[rank].at(schedule::name_of(action, 2));
      measured.times[rank].push_back(
          {static_cast<double>(start - first) / 1e3, static_cast<double>(end - first) / 1e3});
    }
  }
  return measured;
}

// The mean of each op on each rank.
schedule::Cost mean_costs(const Measured& measured) {
  std::map<std::pair<int, schedule::Op>, std::pair<double, int>> sums;
  for (size_t rank = 0; rank < measured.times.size(); ++rank) {
    for (size_t i = 0; i < measured.times[rank].size(); ++i) {
      auto& [sum, count] = sums[{static_cast<int>(rank), measured.schedule.actions[rank][i].op}];
      sum += measured.times[rank][i].end - measured.times[rank][i].start;
      ++count;
    }
  }
  return [sums](int rank, const Action& action) {
    const auto found = sums.find({rank, action.op});
    return found == sums.end() ? 0 : found->second.first / found->second.second;
  };
}

// In the colours of the page, but for the numbers in the bars.
std::string themed(const std::string& svg) {
  std::string result;
  for (size_t at = 0; at < svg.size();) {
    const size_t end = std::min(svg.find('\n', at), svg.size() - 1) + 1;
    std::string line = svg.substr(at, end - at);
    const auto replace = [&](std::string_view from, std::string_view to) {
      for (size_t place = 0; (place = line.find(from, place)) != std::string::npos;
           place += to.size())
        line.replace(place, from.size(), to);
    };
    if (line.find("font-size=\"11\"") == std::string::npos) {
      replace("\"#1a1a1a\"", "\"var(--ink)\"");
      replace("\"#5f6670\"", "\"var(--dim)\"");
      replace("\"#eceef1\"", "\"var(--idle)\"");
      replace("\"#ffffff\"", "\"var(--card)\"");
    }
    if (line.starts_with("<svg")) replace("<svg ", "<svg class=\"gantt\" role=\"img\" ");
    result += line;
    at = end;
  }
  return result;
}

}  // namespace

std::string pipeline_section(const Run& run) {
  if (!run.pipeline.is_object()) return "";
  std::string body;
  try {
    const Measured measured = measured_in(run.pipeline);
    size_t bars = 0;
    for (const auto& times : measured.times) bars += times.size();
    const auto real = schedule::summarize(measured.schedule, measured.times);
    const auto ideal = schedule::simulate(measured.schedule, mean_costs(measured));
    if (2 * bars <= kMostBars) {
      const auto step = run.pipeline.value("step", int64_t{0});
      for (const auto& [name, simulation] : {std::pair(format("step {} as measured", step), &real),
                                             {std::string("simulated"), &ideal}}) {
        body += "<figure class=\"card gantt\">" +
                themed(to_svg(schedule::to_chart(measured.schedule, *simulation,
                                                 {.name = name, .unit = "ms"}))) +
                "</figure>\n";
      }
    } else {
      body += format(
          "<p class=\"dim\">A step has {} actions, too many for this page: lockstep schedule "
          "--trace shows them.</p>",
          bars);
    }
    std::vector<std::vector<Cell>> rows;
    for (const auto& [name, simulation] : {std::pair("measured", &real), {"simulated", &ideal}})
      rows.push_back({text_cell(name), number_cell(format("{:.4g}", simulation->makespan)),
                      number_cell(format("{:.1f}", 100 * simulation->bubble_makespan))});
    body += table("Pipeline of data-parallel replica 0", {"", "ms", "idle, %"}, rows);
  } catch (const std::exception&) {  // of another version
    return "";
  }
  return "<section id=\"pipeline\"><h2>Pipeline</h2>\n" + body + "</section>\n";
}

}  // namespace lockstep::report
