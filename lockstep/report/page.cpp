// SPDX-License-Identifier: Apache-2.0
#include "lockstep/report/page.h"

#include <algorithm>
#include <cmath>

#include "lockstep/core/format.h"
#include "lockstep/core/version.h"
#include "lockstep/report/assets.h"
#include "lockstep/report/markup.h"
#include "lockstep/report/sections.h"

namespace lockstep::report {
namespace {

using io::Json;

// Short numbers: a page must stay small.
std::string column_json(const std::vector<std::vector<double>>& rows,
                        const std::function<double(const std::vector<double>&)>& value,
                        int digits) {
  std::string text = "[";
  for (const auto& row : rows) {
    const double number = value(row);
    text += (text.size() > 1 ? "," : "") +
            (std::isfinite(number) ? format("{:.{}g}", number, digits) : std::string("null"));
  }
  return text + "]";
}

std::string string_json(const std::string& text) {
  return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string map_json(const MapData& map) {
  std::string text = format("{{\"rows\":{},\"columns\":{},\"values\":[",
                            Json(map.rows).dump(-1, ' ', false, Json::error_handler_t::replace),
                            Json(map.columns).dump());
  for (size_t i = 0; i < map.values.size(); ++i) {
    std::vector<std::vector<double>> rows;
    for (const double value : map.values[i]) rows.push_back({value});
    text += (i > 0 ? "," : "") + column_json(
                                     rows, [](const auto& row) { return row[0]; }, 3);
  }
  return text + "]}";
}

std::string run_json(const Run& run, size_t index) {
  const auto rows = run.steps.rows();
  const auto column = [&](size_t which, int digits) {
    return column_json(
        rows, [&](const auto& row) { return row[which]; }, digits);
  };
  std::string text = format(
      "{{\"name\":{},\"step\":{},\"tokens\":{},\"hours\":{},\"loss\":{},\"grad_norm\":{},\"lr\":{},"
      "\"tokens_per_s\":{},\"step_ms\":{}",
      string_json(run.name), column(kStep, 9), column(kTokens, 7),
      column_json(
          rows, [&](const auto& row) { return run.hours(row[kTime]); }, 6),
      column(kLoss, 6), column(kGradNorm, 4), column(kLr, 4), column(kTokensPerSecond, 4),
      column(kStepMs, 4));
  text += ",\"split\":{";
  for (size_t i = 0; i < kSplits; ++i) {
    if (run.steps.sum(kCompute + i) > 0)
      text += format("{}\"{}\":{}", text.back() == '{' ? "" : ",", kSplitNames[i],
                     column(kCompute + i, 4));
  }
  text += "},\"validation\":[";
  for (const Validation& each : run.validations) {
    if (std::isfinite(each.loss))
      text += format("{}[{},{:.6g}]", text.back() == '[' ? "" : ",", each.step, each.loss);
  }
  text += "],\"events\":[";
  for (const Event& event : run.events)
    text += format("{}[{},{},{}]", text.back() == '[' ? "" : ",", event.step,
                   string_json(event.kind), string_json(event.text.substr(0, 120)));
  const double mfu = run.mfu(1);
  text += format("],\"mfu\":{},\"maps\":{{\"ranks{}\":{}",
                 std::isfinite(mfu) ? format("{:.6g}", mfu) : "null", index,
                 map_json(map_of_ranks(run)));
  for (const auto& [quantity, values] : run.health.values)
    text += format(",{}:{}", string_json(format("{}{}", quantity, index)),
                   map_json(map_of_health(run, quantity)));
  return text + "}}";
}

// A browser runs no script but the one with this checksum.
std::string base64_of_hex(std::string_view hex) {
  static constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  const auto nibble = [&](size_t i) {
    return i < hex.size() ? static_cast<unsigned>(hex[i] <= '9' ? hex[i] - '0' : hex[i] - 'a' + 10)
                          : 0u;
  };
  std::string text;
  for (size_t i = 0; i < hex.size(); i += 6) {
    unsigned bits = 0;
    for (size_t j = 0; j < 6; ++j) bits = bits << 4 | nibble(i + j);
    for (size_t j = 0; j < 4; ++j)
      text += i + (j * 3 + 1) / 2 >= hex.size() && j > 1 ? '=' : kDigits[bits >> (18 - 6 * j) & 63];
  }
  return text;
}

std::string link(const char* id, const char* title, const std::string& html) {
  return html.find(format("id=\"{}\"", id)) == std::string::npos
             ? ""
             : format("<a href=\"#{}\">{}</a>", id, title);
}

}  // namespace

size_t rows_of_page(size_t runs) {
  return std::max<size_t>(300, 1400 / std::max<size_t>(1, runs)) / 2 * 2;
}

std::string page(const std::vector<Run>& runs) {
  std::string title = runs[0].name;
  if (runs.size() > 1) title += format(" and {} more", runs.size() - 1);
  std::string overview, details;
  for (size_t i = 0; i < runs.size(); ++i) {
    const Run& run = runs[i];
    overview += format(
        "<article class=\"run\"><h2><i class=\"b{}\"></i>{} <span class=\"state "
        "{}\">{}</span></h2><p class=\"dim\">{}</p>{}{}</article>\n",
        i % 8, escaped(run.name), escaped(run.state), escaped(run.state),
        run.config ? escaped(run.config->model.describe()) : "", tiles(run), findings_section(run));
    const std::string mine = time_section(run, i) + ranks_section(run, i) + pipeline_section(run) +
                             memory_section(run) + health_section(run, i) + events_section(run) +
                             samples_section(run);
    // The first run's sections are open to the table of contents.
    if (runs.size() > 1 && !mine.empty())
      details +=
          format("<details class=\"of\"{}><summary><i class=\"b{}\"></i>{}</summary>{}</details>\n",
                 i == 0 ? " open" : "", i % 8, escaped(run.name), mine);
    if (runs.size() == 1) details = mine;
  }
  const std::string body = "<section id=\"overview\">" + overview + "</section>\n" +
                           curves_section(runs) + details + settings_section(runs);
  std::string html =
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
      "content=\"width=device-width, initial-scale=1\">";
  html += format(
      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src "
      "'unsafe-inline'; script-src 'sha256-{}'\">",
      base64_of_hex(page_script_sha256()));
  html += format("<title>{} - Lockstep</title><style>{}</style></head><body>\n", escaped(title),
                 page_style());
  html += format(
      "<header><strong>Lockstep</strong><nav aria-label=\"Sections\"><a "
      "href=\"#overview\">Overview</a>{}{}{}{}{}{}{}{}{}</nav></header><main>\n",
      link("curves", "Curves", body), link("time0", "Step time", body),
      link("ranks0", "Ranks", body), link("pipeline", "Pipeline", body),
      link("memory", "Memory", body), link("health0", "Gradients", body),
      link("events", "Events", body), link("samples", "Text", body),
      link("settings", "Configuration", body));
  html += body;
  html += format(
      "</main><footer class=\"dim\">lockstep report {}. Drag to zoom, double-click to reset. With "
      "the keyboard: Tab to a chart, arrow keys move, + and - zoom, 0 resets.</footer>\n",
      LOCKSTEP_VERSION);
  std::string data = "{\"runs\":[";
  for (size_t i = 0; i < runs.size(); ++i) data += (i > 0 ? "," : "") + run_json(runs[i], i);
  html +=
      "<script type=\"application/json\" id=\"data\">" + script_json(data + "]}") + "</script>\n";
  return html + "<script>" + std::string(page_script()) + "</script></body></html>\n";
}

}  // namespace lockstep::report
