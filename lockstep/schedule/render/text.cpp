// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstddef>
#include <nlohmann/json.hpp>
#include <utility>

#include "lockstep/core/format.h"
#include "lockstep/schedule/render/render.h"

namespace lockstep::schedule {
namespace {

std::string heading(const Pipeline& pipeline) {
  return format("{}: {}\n", layout::name_of(pipeline.kind), describe(pipeline));
}

std::string rows(const std::vector<std::vector<Action>>& ranks, int chunks) {
  std::string text;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    text += format("rank {}: {}\n", rank, ops(ranks[rank], chunks));
  }
  return text;
}

std::string numbers(const Simulation& simulation) {
  std::string text = format("makespan {:.6g}\n", simulation.makespan);
  std::vector<std::string> spans;
  for (const double span : simulation.span) spans.push_back(format("{:.6g}", span));
  text += format("spans {}\n", join(spans, " "));
  text += format("bubble {:.6f} of the makespan, {:.6f} of the longest span\n",
                 simulation.bubble_makespan, simulation.bubble_span);
  text += format("peak live {}\n", join(simulation.peak_live, " "));
  return text;
}

}  // namespace

std::string describe(const Pipeline& pipeline) {
  const auto [kind, ranks, microbatches, chunks, order] = pipeline;
  return format("{} rank{}, {} micro-batch{}, {} chunk{} per rank", ranks, ranks == 1 ? "" : "s",
                microbatches, microbatches == 1 ? "" : "es", chunks, chunks == 1 ? "" : "s");
}

std::string ops(const std::vector<Action>& actions, int chunks) {
  std::vector<std::string> names;
  for (const Action& action : actions) names.push_back(name_of(action, chunks));
  return join(names, " ");
}

std::string to_text(const Schedule& schedule, const Simulation& simulation) {
  return heading(schedule) + rows(schedule.actions, schedule.chunks) + numbers(simulation);
}

std::string to_text(const Program& program, const Simulation& of) {
  return heading(program) + rows(program.actions, program.chunks) + numbers(of);
}

std::string to_json(const Schedule& schedule, const Simulation& simulation) {
  std::vector<std::string> lines;
  for (const auto& actions : schedule.actions) lines.push_back(ops(actions, schedule.chunks));
  const nlohmann::ordered_json json = {{"kind", layout::name_of(schedule.kind)},
                                       {"stages", schedule.ranks},
                                       {"microbatches", schedule.microbatches},
                                       {"chunks", schedule.chunks},
                                       {"makespan", simulation.makespan},
                                       {"span", simulation.span},
                                       {"bubble_makespan", simulation.bubble_makespan},
                                       {"bubble_span", simulation.bubble_span},
                                       {"peak_live", simulation.peak_live},
                                       {"ops", lines}};
  return json.dump(2) + "\n";
}

Chart to_chart(const Schedule& schedule, const Simulation& simulation, const ChartLabels& labels) {
  std::string title =
      format("{}: {}; makespan {:.6g}{}, bubble {:.1f}%",
             labels.name.empty() ? layout::name_of(schedule.kind) : labels.name, describe(schedule),
             simulation.makespan, labels.unit.empty() ? "" : " " + labels.unit,
             100 * simulation.bubble_makespan);
  // Rounding errors of a bubble of nothing are not a second number.
  if (simulation.bubble_makespan - simulation.bubble_span > 5e-4) {
    title += format(" ({:.1f}% of the longest span)", std::abs(100 * simulation.bubble_span));
  }
  Chart chart{.title = std::move(title), .unit = labels.unit, .chunks = schedule.chunks};
  for (int rank = 0; rank < schedule.ranks; ++rank) {
    chart.notes.push_back(format("peak live {}", simulation.peak_live[rank]));
    for (size_t i = 0; i < schedule.actions[rank].size(); ++i) {
      const auto& [start, end] = simulation.times[rank][i];
      chart.bars.push_back({rank, schedule.actions[rank][i], start, end});
    }
  }
  return chart;
}

}  // namespace lockstep::schedule
