// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/schedule.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

#include "lockstep/cli/common/options.h"
#include "lockstep/cli/schedule_trace.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/schedule/lower.h"
#include "lockstep/schedule/render/render.h"
#include "lockstep/schedule/schedule.h"
#include "lockstep/schedule/simulate.h"

namespace lockstep::cli {
namespace {

using Words = std::vector<std::string>;

double parse_time(const std::string& option, std::string_view text) {
  double value = 0;
  const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (failure != std::errc{} || end != text.data() + text.size() || !std::isfinite(value) ||
      value < 0) {
    throw ConfigError(format("schedule: {} is '{}', must be a number, 0 or more", option, text));
  }
  return value;
}

// "F=1,I=1,W=1"
schedule::Costs parse_costs(std::string_view text) {
  schedule::Costs costs;
  while (!text.empty()) {
    const auto part = text.substr(0, text.find(','));
    text.remove_prefix(std::min(text.size(), part.size() + 1));
    if (part.size() < 2 || part[1] != '=' ||
        std::string_view("FBIW").find(part[0]) == std::string_view::npos) {
      throw ConfigError(
          format("schedule: --cost has '{}', must be F=, B=, I= or W= and a number", part));
    }
    const double value = parse_time(format("--cost {}", part[0]), part.substr(2));
    switch (part[0]) {
      case 'F':
        costs.forward = value;
        break;
      case 'B':
        costs.backward = value;
        break;
      case 'I':
        costs.input = value;
        break;
      default:
        costs.weight = value;
    }
  }
  return costs;
}

void write(const std::string& text, const std::string& output) {
  if (output.empty()) {
    std::cout << text;
    return;
  }
  std::ofstream file(output, std::ios::binary);
  if (!(file << text << std::flush)) throw SystemError(format("writing {}", output), errno);
}

std::string render(const schedule::Schedule& schedule, const schedule::Simulation& simulation,
                   const std::string& form) {
  if (form == "csv") return to_csv(schedule);
  if (form == "json") return to_json(schedule, simulation);
  if (form == "svg") return to_svg(to_chart(schedule, simulation));
  return to_text(schedule, simulation);
}

std::string render(const MeasuredStep& measured, const std::string& form) {
  const auto& [step, schedule, simulation, runs, replicas] = measured;
  if (form == "text") return to_text(measured);
  if (form == "svg") {
    return to_svg(to_chart(schedule, simulation,
                           {.name = format("step {} as measured", step), .unit = "ms"}));
  }
  if (form == "json") {
    auto json = nlohmann::ordered_json::parse(to_json(schedule, simulation));
    json["kind"] = "measured";
    json["step"] = step;
    return json.dump(2) + "\n";
  }
  return to_csv(schedule);
}

}  // namespace

int schedule(const Words& arguments) {
  std::string kind_name = "1f1b", costs_text = "F=1,I=1,W=1", hop_text = "0", form = "text";
  std::string output, trace;
  schedule::ScheduleOptions options{.ranks = 0, .microbatches = 0, .chunks = 0};
  int64_t step = 0;
  bool lower = false;
  CLI::App app;
  auto* kind = app.add_option("--kind", kind_name, "Schedule; `file` reads it from --file")
                   ->capture_default_str();
  auto* stages = app.add_option("--stages", options.ranks, "Number of pipeline ranks");
  auto* microbatches =
      app.add_option("--microbatches", options.microbatches, "Number of micro-batches per step");
  auto* chunks =
      app.add_option("--chunks", options.chunks, "Number of stages (model chunks) per rank [1]");
  auto* group = app.add_option(
      "--group", options.group,
      "interleaved and zb-1p only: consecutive micro-batches per chunk [number of ranks]");
  auto* file =
      app.add_option("--file", options.file, "Schedule file in the format of --format csv");
  auto* costs = app.add_option("--cost", costs_text,
                               "Time of a forward (F), and of the input (I) and weight (W) halves "
                               "of a backward, on one chunk; B=2 sets the whole backward")
                    ->capture_default_str();
  auto* hop =
      app.add_option("--hop", hop_text, "Time to send an activation from one rank to the next")
          ->capture_default_str();
  app.add_option("--format", form, "Output format")
      ->check(one_of({"text", "csv", "json", "svg"}))
      ->capture_default_str();
  app.add_option("--output", output, "Output file; an existing file is overwritten");
  auto* lowered =
      app.add_flag("--lower", lower, "Also show sends and receives (--format text only)");
  auto* traced =
      app.add_option("--trace", trace,
                     "Run folder, or folder with traces: show a step as it ran, in milliseconds");
  auto* stepped =
      app.add_option("--step", step, "Step of the trace to show [the last complete one]");
  if (const auto status =
          parse(app, "schedule",
                "Shows a pipeline schedule, its simulated time and the activations it holds.\n"
                "Usage: lockstep schedule --kind KIND --stages P --microbatches M [OPTIONS]\n"
                "       lockstep schedule --trace DIR [OPTIONS]\n",
                arguments))
    return *status;

  if (*traced) {
    for (const auto* option :
         {kind, stages, microbatches, chunks, group, file, costs, hop, lowered}) {
      if (*option) {
        throw ConfigError(
            format("schedule: --trace and {} exclude each other", option->get_name()));
      }
    }
    write(render(read_step(trace, *stepped ? std::optional(step) : std::nullopt), form), output);
    return 0;
  }
  if (*stepped) throw ConfigError("schedule: --step selects a step of a trace; it needs --trace");
  if (lower && form != "text") {
    throw ConfigError(format("schedule: --lower is for --format text, not {}", form));
  }
  options.kind = layout::parse_pipeline_schedule(kind_name);
  if (options.kind != schedule::Kind::file) {
    for (const auto* option : {stages, microbatches}) {
      if (!*option) throw ConfigError(format("schedule: {} is required", option->get_name()));
    }
    if (!*chunks) options.chunks = 1;
  }
  const auto order = schedule::generate(options);
  const auto simulation = schedule::simulate(order, schedule::uniform(parse_costs(costs_text)),
                                             parse_time("--hop", hop_text));
  write(lower ? to_text(schedule::lower(order), simulation) : render(order, simulation, form),
        output);
  return 0;
}

}  // namespace lockstep::cli
