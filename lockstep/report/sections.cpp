// SPDX-License-Identifier: Apache-2.0
#include "lockstep/report/sections.h"

#include <algorithm>
#include <cmath>
#include <ctime>
#include <set>

#include "lockstep/core/format.h"
#include "lockstep/core/version.h"
#include "lockstep/report/chart.h"
#include "lockstep/report/findings.h"
#include "lockstep/report/markup.h"

namespace lockstep::report {
namespace {

constexpr size_t kMostEventRows = 200, kMostRankRows = 128;

std::string section(const char* id, const char* title, const std::string& body) {
  if (body.empty()) return "";
  return format(
      "<section id=\"{0}\" aria-labelledby=\"{0}-title\"><h2 "
      "id=\"{0}-title\">{1}</h2>\n{2}</section>\n",
      id, title, body);
}

// A figure with a static picture, which the script replaces by an interactive one.
std::string figure(const char* chart, const std::string& title, const LineChart& picture,
                   const char* more = "") {
  const std::string svg = to_svg(picture);
  if (svg.empty()) return "";
  std::string legend;
  for (const Line& line : picture.lines)
    legend += format("<span><i class=\"b{}\"></i>{}</span>", line.colour % 8, escaped(line.name));
  return format(
      "<figure class=\"card{}\"><figcaption>{}</figcaption><div class=\"legend\" "
      "aria-live=\"polite\">{}</div><div class=\"chart\" data-chart=\"{}\"></div><div "
      "class=\"static\">{}</div></figure>\n",
      more, escaped(title), legend, chart, svg);
}

std::string card(const std::string& title, const std::string& body) {
  return body.empty() ? ""
                      : format("<figure class=\"card\"><figcaption>{}</figcaption>{}</figure>\n",
                               escaped(title), body);
}

std::vector<Mark> marks_of(const Run& run) {
  static const std::set<std::string> shown{"saved", "started", "skipped", "rolled back",
                                           "slow",  "failed",  "warning"};
  std::vector<Mark> marks;
  for (const Event& event : run.events) {
    if (shown.contains(event.kind) && event.step > 0)
      marks.push_back({static_cast<double>(event.step), event.kind});
  }
  return marks;
}

LineChart picture(const std::vector<Run>& runs, Column column, const std::string& title, bool log) {
  LineChart chart{.title = title, .log = log};
  for (size_t i = 0; i < runs.size(); ++i) {
    Line line{.name = runs[i].name, .colour = static_cast<int>(i)};
    for (const auto& row : runs[i].steps.rows()) {
      line.x.push_back(row[kStep]);
      line.y.push_back(row[column]);
    }
    chart.lines.push_back(std::move(line));
  }
  if (runs.size() == 1) chart.marks = marks_of(runs[0]);
  return chart;
}

std::string time_text(double time) {
  if (!std::isfinite(time) || std::abs(time) > 1e11) return "";
  const auto seconds = static_cast<std::time_t>(time);
  std::tm utc{};
  gmtime_r(&seconds, &utc);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S", &utc);
  return text;
}

std::string shown_loss(double loss) { return std::isfinite(loss) ? format("{:.4f}", loss) : "-"; }

std::string layout_text(const config::LayoutConfig& parallel, int ranks) {
  const int others = std::max(1, parallel.tp * parallel.pp * parallel.cp);
  const std::string context = parallel.cp > 1 ? format(" x cp {}", parallel.cp) : "";
  return format("dp {} x tp {} x pp {}{}", std::max(1, ranks / others), parallel.tp, parallel.pp,
                context);
}

}  // namespace

std::string tiles(const Run& run) {
  const Series& steps = run.steps;
  std::string html = "<dl class=\"tiles\">";
  const auto tile = [&](const char* name, const std::string& value, const std::string& note = "") {
    html += format("<div><dt>{}</dt><dd>{}<small>{}</small></dd></div>", name, escaped(value),
                   escaped(note));
  };
  if (steps.count() > 0) {
    const double speed = steps.typical(kTokensPerSecond), mfu = run.mfu(speed);
    tile("steps", short_count(steps.last(kStep)),
         run.config ? format("of {}", short_count(static_cast<double>(run.config->train.steps)))
                    : "");
    tile("loss", shown_loss(steps.last(kLoss)), format("lowest {}", shown_loss(steps.min(kLoss))));
    if (!run.validations.empty()) {
      const auto best = std::ranges::min_element(run.validations, {}, [](const Validation& each) {
        return std::isfinite(each.loss) ? each.loss : 1e300;
      });
      tile("validation loss", shown_loss(run.validations.back().loss),
           format("lowest {} at step {}", shown_loss(best->loss), best->step));
    }
    tile("tokens/s", short_count(speed), format("{} in all", short_count(steps.last(kTokens))));
    tile("step", format("{:.4g} ms", steps.typical(kStepMs)),
         format("slowest {:.4g} ms", steps.max(kStepMs)));
    if (std::isfinite(mfu))
      tile("MFU", format("{:.1f} %", 100 * mfu),
           format("of {}FLOP/s", short_count(run.peak_flops())));
    tile("training time", short_duration(steps.sum(kStepMs) / 1e3),
         format("{} by the clock", short_duration(steps.last(kTime) - steps.min(kTime))));
    tile("peak memory", short_size(steps.max(kPeakBytes)), "process of rank 0");
  }
  tile("ranks", std::to_string(run.ranks()),
       run.config ? layout_text(run.config->parallel, run.ranks()) : "");
  return html + "</dl>\n";
}

std::string findings_section(const Run& run) {
  std::string items;
  for (const Finding& finding : findings(run)) {
    items += format(
        "<li class=\"{}\"><p>{}</p>{}</li>", finding.is_problem ? "problem" : "note",
        escaped(finding.text),
        finding.advice.empty() ? "" : format("<p class=\"dim\">{}</p>", escaped(finding.advice)));
  }
  return items.empty() ? "" : format("<ul class=\"findings\">{}</ul>\n", items);
}

std::string curves_section(const std::vector<Run>& runs) {
  LineChart loss = picture(runs, kLoss, "Loss", true);
  loss.title = "Training loss, and validation loss as dots";
  loss.width = kFullWidth;
  for (size_t i = 0; i < runs.size(); ++i) {
    Line line{.name = runs[i].name + ", validation", .colour = static_cast<int>(i), .dots = true};
    for (const Validation& each : runs[i].validations) {
      line.x.push_back(static_cast<double>(each.step));
      line.y.push_back(each.loss);
    }
    if (!line.x.empty()) loss.lines.push_back(std::move(line));
  }
  const std::string main = figure("loss", "Loss", loss, " wide");
  if (main.empty())
    return section("curves", "Curves", "<p class=\"dim\">No step is recorded yet.</p>");
  return section("curves", "Curves",
                 "<div class=\"controls\" id=\"controls\" hidden></div>" + main +
                     "<div class=\"grid2\">" +
                     figure("grad_norm", "Gradient norm, before clipping",
                            picture(runs, kGradNorm, "Gradient norm", true)) +
                     figure("lr", "Learning rate", picture(runs, kLr, "Learning rate", false)) +
                     figure("tokens_per_s", "Tokens per second",
                            picture(runs, kTokensPerSecond, "Tokens per second", false)) +
                     figure("step_ms", "Time of a step, ms",
                            picture(runs, kStepMs, "Time of a step, ms", false)) +
                     "</div>");
}

std::string time_section(const Run& run, size_t index) {
  const std::vector<Share> parts = shares(run);
  if (parts.empty()) return "";
  Bars bars{.title = "Where the time of a step goes"};
  std::vector<std::vector<Cell>> rows;
  for (const Share& share : parts) {
    bars.rows.push_back({share.name,
                         format("{:.1f} %, {:.4g} ms", 100 * share.part, share.ms),
                         {{share.name, "k-" + share.name, share.part}}});
    rows.push_back({text_cell(share.name), number_cell(format("{:.4g}", share.ms)),
                    number_cell(format("{:.1f}", 100 * share.part))});
  }
  // Over time, as lines of the parts; the script stacks them.
  LineChart over{.title = "Parts of a step over time, ms"};
  int colour = 0;
  for (size_t i = 0; i < kSplits; ++i) {
    if (std::ranges::find(parts, kSplitNames[i], &Share::name) == parts.end()) continue;
    Line line{.name = std::string(kSplitNames[i]), .colour = colour++};
    for (const auto& row : run.steps.rows()) {
      line.x.push_back(row[kStep]);
      line.y.push_back(row[kCompute + i]);
    }
    over.lines.push_back(std::move(line));
  }
  std::string body =
      "<div class=\"grid2\">" + card("Where the time of a step goes, on rank 0", to_svg(bars)) +
      figure(format("split{}", index).c_str(), "Parts of a step, ms", over) + "</div>";
  std::vector<std::vector<Cell>> kinds;
  const double steps = run.steps_of_operations;
  for (const auto& [name, cost] : run.operations) {
    if (steps <= 0) break;
    const bool message = name == "send" || name == "recv";
    kinds.push_back(
        {text_cell(name), number_cell(format("{:.1f}", cost.count / steps)),
         number_cell(short_size(cost.bytes / steps)),
         number_cell(format("{:.4g}", cost.flight_ms / steps)),
         number_cell(format("{:.4g}", cost.waited_ms / steps)),
         number_cell(
             message || cost.flight_ms <= 0
                 ? "-"
                 : format("{:.0f} %", 100 * std::max(0.0, 1 - cost.waited_ms / cost.flight_ms)))});
  }
  if (!kinds.empty()) {
    body += "<h3>Communication by kind</h3>" +
            table("Communication of rank 0 in a step, by kind",
                  {"operation", "calls", "bytes", "in flight, ms", "waited for, ms", "overlapped"},
                  kinds);
    const double hidden = overlap(run);
    if (std::isfinite(hidden))
      body += format(
          "<p class=\"dim\">{:.0f} % of the time of collectives is overlapped with computation. "
          "Sends and receives of a pipeline are waited for by threads of their own; what the "
          "computation waits is the bubble.</p>",
          100 * hidden);
  }
  return section(format("time{}", index).c_str(), "Step time", body);
}

MapData map_of_ranks(const Run& run) {
  MapData map;
  const auto rows = run.busy.rows();
  if (rows.empty()) return map;
  const auto busy = busy_of_ranks(run);
  std::vector<size_t> ranks(busy.size());
  for (size_t i = 0; i < ranks.size(); ++i) ranks[i] = i;
  if (ranks.size() > kMostMapRows) {  // the slowest
    std::ranges::stable_sort(ranks, std::greater<>(), [&](size_t rank) { return busy[rank]; });
    ranks.resize(kMostMapRows);
    std::ranges::sort(ranks);
  }
  const size_t columns = std::min(rows.size(), kMostMapColumns);
  map.values.assign(ranks.size(), std::vector<double>(columns, kNone));
  for (const size_t rank : ranks) map.rows.push_back(format("rank {}", rank));
  for (size_t column = 0; column < columns; ++column) {
    const size_t first = column * rows.size() / columns,
                 last = (column + 1) * rows.size() / columns;
    map.columns.push_back(format("step {:.0f}", rows[first][0]));
    for (size_t i = 0; i < ranks.size(); ++i) {
      for (size_t row = first; row < last; ++row)
        map.values[i][column] = std::fmax(map.values[i][column], rows[row][ranks[i] + 1]);
    }
  }
  return map;
}

std::string ranks_section(const Run& run, size_t index) {
  const MapData map = map_of_ranks(run);
  if (map.rows.empty()) return "";
  const auto busy = busy_of_ranks(run);
  const auto slow = stragglers(run);
  std::vector<double> sorted = busy;
  std::ranges::sort(sorted);
  const double usual = std::max(1e-9, sorted[(sorted.size() - 1) / 2]);
  std::vector<std::vector<Cell>> rows;
  for (size_t i = 0; i < std::min(busy.size(), kMostRankRows); ++i) {
    const bool is_slow = std::ranges::find(slow, static_cast<int>(i)) != slow.end();
    rows.push_back({number_cell(std::to_string(i)),
                    number_cell(format("{:.4g}", busy[i])),
                    number_cell(format("{:.2f}", busy[i] / usual)),
                    number_cell(i < run.peak_bytes.size() ? short_size(run.peak_bytes[i]) : "-"),
                    {is_slow ? "<b class=\"bad\">slow</b>" : "", false}});
  }
  std::string body = format(
      "<figure class=\"card\"><figcaption>Time that each rank computes in a step, "
      "ms</figcaption><div class=\"map\" data-map=\"ranks{}\">{}</div></figure>",
      index,
      to_svg(HeatMap{"Time that each rank computes in a step, ms", map.rows, map.columns,
                     map.values, false, " ms", kFullWidth}));
  body += table("Ranks, mean of the last steps",
                {"rank", "computes, ms", "of the median", "peak memory", ""}, rows);
  return section(format("ranks{}", index).c_str(), "Ranks", body);
}

MapData map_of_health(const Run& run, const std::string& quantity) {
  MapData map;
  const auto found = run.health.values.find(quantity);
  if (found == run.health.values.end() || found->second.empty()) return map;
  const size_t layers = run.health.layers.size(), most = std::min(layers, kMostMapRows);
  const size_t columns = std::min(found->second.size(), kMostMapColumns);
  for (size_t column = 0; column < columns; ++column)
    map.columns.push_back(
        format("step {}", run.health.steps[column * found->second.size() / columns]));
  for (size_t row = 0; row < most; ++row) {
    const size_t layer = row * layers / most;
    map.rows.push_back(run.health.layers[layer]);
    map.values.emplace_back();
    for (size_t column = 0; column < columns; ++column)
      map.values.back().push_back(found->second[column * found->second.size() / columns][layer]);
  }
  return map;
}

std::string health_section(const Run& run, size_t index) {
  std::string body;
  for (const auto& [quantity, title] :
       {std::pair("grad_norm", "Gradient norm of each layer"),
        {"update_ratio", "Size of an update, relative to the weights"}}) {
    const MapData map = map_of_health(run, quantity);
    if (map.rows.empty()) continue;
    body += format(
        "<figure class=\"card\"><figcaption>{}</figcaption><div class=\"map\" "
        "data-map=\"{}{}\">{}</div></figure>",
        title, quantity, index,
        to_svg(HeatMap{title, map.rows, map.columns, map.values, true, ""}));
  }
  return section(format("health{}", index).c_str(), "Gradients and weights",
                 body.empty() ? "" : "<div class=\"grid2\">" + body + "</div>");
}

std::string memory_section(const Run& run) {
  if (run.memory.empty()) return "";
  Bars bars{.title = "Memory of tensors by kind, measured and planned", .width = kFullWidth};
  std::vector<std::vector<Cell>> rows;
  for (size_t rank = 0; rank < run.memory.size(); ++rank) {
    const RankMemory& memory = run.memory[rank];
    for (const auto& [name, kinds] :
         {std::pair("measured", &memory.measured), {"planned", &memory.planned}}) {
      Bars::Row row{format("rank {} {}", rank, name), short_size(RankMemory::sum(*kinds)), {}};
      std::vector<Cell> cells{number_cell(std::to_string(rank)), text_cell(name)};
      for (size_t i = 0; i < kinds->size(); ++i) {
        row.parts.push_back({format("{} {}", kMemoryNames[i], short_size((*kinds)[i])),
                             format("m{}", i), (*kinds)[i]});
        cells.push_back(number_cell(short_size((*kinds)[i])));
      }
      cells.push_back(number_cell(short_size(RankMemory::sum(*kinds))));
      if (rank < 8) bars.rows.push_back(std::move(row));
      if (rank < kMostRankRows) rows.push_back(std::move(cells));
    }
  }
  std::string legend = "<div class=\"legend\">";
  for (size_t i = 0; i < kMemoryNames.size(); ++i)
    legend += format("<span><i class=\"m{}\"></i>{}</span>", i, kMemoryNames[i]);
  return section("memory", "Memory",
                 card("Memory of tensors at the peak of a step", legend + "</div>" + to_svg(bars)) +
                     table("Memory of tensors by rank and kind",
                           {"rank", "", "parameters", "gradients", "optimizer", "activations",
                            "buffers", "total"},
                           rows));
}

std::string events_section(const Run& run) {
  std::vector<std::vector<Cell>> rows;
  for (const Event& event : run.events) {
    if (rows.size() == kMostEventRows) rows.erase(rows.begin());
    rows.push_back(
        {{format("<b class=\"event {}\">{}</b>", escaped(event.kind), escaped(event.kind)), false},
         number_cell(std::to_string(event.step)),
         text_cell(time_text(event.time)),
         text_cell(event.text.substr(0, 1000))});
  }
  return section(
      "events", "Events",
      rows.empty() ? "" : table("Events, times in UTC", {"event", "step", "time, UTC", ""}, rows));
}

std::string samples_section(const Run& run) {
  std::string body;
  for (size_t i = run.samples.size() - std::min<size_t>(run.samples.size(), 32);
       i < run.samples.size(); ++i) {
    const TextSample& sample = run.samples[i];
    body += format("<details{}><summary>step {}</summary><pre><b>{}</b>{}</pre></details>",
                   i + 1 == run.samples.size() ? " open" : "", sample.step, escaped(sample.prompt),
                   escaped(sample.text.substr(0, 2000)));
  }
  return section("samples", "Text written by the model", body);
}

std::string settings_section(const std::vector<Run>& runs) {
  std::set<std::string> keys;
  for (const Run& run : runs) {
    for (const auto& [key, value] : run.settings) keys.insert(key);
  }
  std::vector<std::string> head{"key"};
  for (const Run& run : runs) head.push_back(run.name);
  std::vector<std::vector<Cell>> all, different;
  for (const std::string& key : keys) {
    std::vector<Cell> row{text_cell(key)};
    std::set<std::string> values;
    for (const Run& run : runs) {
      const auto found = run.settings.find(key);
      values.insert(found == run.settings.end() ? "" : found->second);
      row.push_back(text_cell(found == run.settings.end() ? "-" : found->second.substr(0, 300)));
    }
    if (values.size() > 1) different.push_back(row);
    all.push_back(std::move(row));
  }
  if (all.empty()) return "";
  std::string body;
  if (runs.size() > 1)
    body += "<h3>Differences</h3>" +
            (different.empty()
                 ? std::string("<p class=\"dim\">The runs have the same configuration.</p>")
                 : table("Settings that differ", head, different));
  body += format("<details{}><summary>All settings</summary>{}</details>", "",
                 table("All settings", head, all));
  return section("settings", "Configuration", body);
}

}  // namespace lockstep::report
