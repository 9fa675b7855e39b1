// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/plan/front_svg.h"

#include <algorithm>

#include "lockstep/cli/plan/answer.h"
#include "lockstep/core/format.h"
#include "lockstep/core/size_text.h"
#include "lockstep/schedule/render/render.h"

namespace lockstep::cli {
namespace {

// Sizes in pixels.
constexpr double kPlotLeft = 80, kPlotTop = 40, kPlotWidth = 680, kPlotHeight = 360;
constexpr int kMostMicroBatches = 64;  // of a timeline that can be read

std::string chart_of(const plan::Timeline& timeline) {
  schedule::Chart chart{.title = "first layout: milliseconds of its pipeline",
                        .unit = "ms",
                        .chunks = timeline.schedule.chunks};
  for (size_t rank = 0; rank < timeline.schedule.actions.size(); ++rank) {
    const auto& actions = timeline.schedule.actions[rank];
    for (size_t i = 0; i < actions.size(); ++i) {
      const auto& [start, end] = timeline.simulation.times[rank][i];
      if (actions[i].microbatch >= kMostMicroBatches) continue;
      chart.bars.push_back({static_cast<int>(rank), actions[i], 1e3 * start, 1e3 * end});
    }
  }
  return schedule::to_svg(chart);
}

}  // namespace

std::string front_svg(const std::vector<config::Prediction>& found,
                      const std::vector<size_t>& front,
                      const std::optional<plan::Timeline>& timeline) {
  double most_time = 0, most_memory = 0;
  for (const config::Prediction& each : found) {
    most_time = std::max(most_time, each.time.total());
    most_memory = std::max(most_memory, static_cast<double>(each.memory));
  }
  const auto x = [&](const config::Prediction& each) {
    return kPlotLeft + kPlotWidth * each.time.total() / most_time;
  };
  const auto y = [&](const config::Prediction& each) {
    return kPlotTop + kPlotHeight * (1 - static_cast<double>(each.memory) / most_memory);
  };
  const auto label = [](double at_x, double at_y, const std::string& text, const char* anchor) {
    return format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>\n", at_x, at_y,
                  anchor, text);
  };
  std::string body = label(kPlotLeft, 24, "step time and memory of the largest rank", "start");
  body += format("<path d=\"M{0} {1}v{2}h{3}\" fill=\"none\" stroke=\"#5f6670\"/>\n", kPlotLeft,
                 kPlotTop, kPlotHeight, kPlotWidth);
  for (const config::Prediction& each : found) {
    body += format(
        "<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\" fill=\"#a8cdf5\"><title>{}: {}, "
        "{}</title></circle>\n",
        x(each), y(each), short_text(each), seconds_text(each.time.total()),
        size_text(each.memory));
  }
  std::string line;
  for (const size_t i : front)
    line += format("{}{:.1f} {:.1f}", line.empty() ? "M" : "L", x(found[i]), y(found[i]));
  body += format("<path d=\"{}\" fill=\"none\" stroke=\"#d66a0b\" stroke-width=\"2\"/>\n", line);
  body += label(x(found[0]) + 6, y(found[0]) - 6, short_text(found[0]), "start");
  const double bottom = kPlotTop + kPlotHeight;
  body += label(kPlotLeft, bottom + 18, "0", "middle");
  body += label(kPlotLeft + kPlotWidth, bottom + 18, seconds_text(most_time), "middle");
  body += label(kPlotLeft - 6, kPlotTop + 4, size_text(static_cast<int64_t>(most_memory)), "end");
  const double below = bottom + 40;
  if (timeline) body += format("<svg y=\"{:.0f}\"", below) + chart_of(*timeline).substr(4);
  const double height =
      below + (timeline ? 140 + 32.0 * static_cast<double>(timeline->schedule.actions.size()) : 0);
  return format(
             "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1:.0f}\" "
             "font-family=\"sans-serif\" font-size=\"12\">\n"
             "<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n",
             timeline ? 2560 : 960, height) +
         body + "</svg>\n";
}

}  // namespace lockstep::cli
