// SPDX-License-Identifier: Apache-2.0
#include "lockstep/report/chart.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "lockstep/core/format.h"
#include "lockstep/report/markup.h"

namespace lockstep::report {
namespace {

constexpr double kHeight = 250, kLeft = 58, kRight = 12, kTop = 10, kBottom = 34;
constexpr size_t kMostPoints = 600;  // of a line

struct Range {
  double low = std::numeric_limits<double>::infinity(), high = -low;

  void add(double value) {
    if (!std::isfinite(value)) return;
    low = std::min(low, value);
    high = std::max(high, value);
  }
  bool empty() const { return low > high; }
  double at(double value) const { return high > low ? (value - low) / (high - low) : 0.5; }
};

std::vector<double> ticks(const Range& range, bool log) {
  std::vector<double> values;
  if (log) {
    // Powers of ten; 1, 2 and 5 of each where they are few.
    const bool few = range.high - range.low < 2.5;
    for (double power = std::floor(range.low); power <= range.high; ++power) {
      for (const double factor : {1.0, 2.0, 5.0}) {
        const double value = power + std::log10(factor);
        if (value >= range.low && value <= range.high && (few || factor == 1))
          values.push_back(value);
      }
    }
    if (values.size() >= 2) return values;
    values.clear();
  }
  const double length = range.high - range.low;
  if (length <= 0) return {range.low};
  const double power = std::pow(10, std::floor(std::log10(length / 5)));
  double step = 10 * power;
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (length / (factor * power) <= 6) {
      step = factor * power;
      break;
    }
  }
  for (double value = std::ceil(range.low / step) * step; value <= range.high + step * 1e-9;
       value += step)
    values.push_back(std::abs(value) < step * 1e-9 ? 0 : value);
  return values;
}

std::string text_at(double x, double y, const char* anchor, const std::string& text,
                    const char* style = "") {
  return format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\"{}>{}</text>\n", x, y, anchor,
                style, escaped(text));
}

// Of neighbours the least and the greatest.
Line thinned(const Line& line) {
  if (line.x.size() <= kMostPoints) return line;
  Line few{line.name, line.colour, {}, {}, line.dots};
  const size_t buckets = kMostPoints / 2;
  for (size_t i = 0; i < buckets; ++i) {
    const auto first = line.y.begin() + static_cast<ptrdiff_t>(i * line.y.size() / buckets);
    const auto last = line.y.begin() + static_cast<ptrdiff_t>((i + 1) * line.y.size() / buckets);
    auto [low, high] = std::minmax_element(first, last);
    if (high < low) std::swap(low, high);
    for (const auto& found : {low, high}) {
      few.x.push_back(line.x[static_cast<size_t>(found - line.y.begin())]);
      few.y.push_back(*found);
    }
  }
  return few;
}

}  // namespace

std::string axis_number(double value) {
  const double size = std::abs(value);
  if (size >= 1e6) return format("{:.3g}M", value / 1e6);
  if (size >= 1e4) return format("{:.3g}k", value / 1e3);
  return format("{:.4g}", value);
}

std::string to_svg(const LineChart& chart) {
  Range x, y;
  const double width = chart.width;
  const auto scaled = [&](double value) {
    if (!chart.log) return value;
    return value > 0 ? std::log10(value) : std::numeric_limits<double>::quiet_NaN();
  };
  for (const Line& line : chart.lines) {
    for (size_t i = 0; i < line.x.size(); ++i) {
      if (!std::isfinite(scaled(line.y[i])) || !std::isfinite(line.x[i])) continue;
      x.add(line.x[i]);
      y.add(scaled(line.y[i]));
    }
  }
  if (x.empty()) return "";
  const auto at_x = [&](double value) { return kLeft + x.at(value) * (width - kLeft - kRight); };
  const auto at_y = [&](double value) {
    return kHeight - kBottom - y.at(value) * (kHeight - kTop - kBottom);
  };
  std::string svg =
      format("<svg class=\"plot\" viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\">\n", width,
             kHeight, escaped(chart.title));
  for (const double tick : ticks(y, chart.log)) {
    svg += format("<path class=\"grid\" d=\"M{:.1f} {:.1f}H{:.1f}\"/>", kLeft, at_y(tick),
                  width - kRight);
    svg += text_at(kLeft - 6, at_y(tick) + 4, "end",
                   axis_number(chart.log ? std::pow(10, tick) : tick));
  }
  for (const double tick : ticks(x, false))
    svg += text_at(at_x(tick), kHeight - kBottom + 16, "middle", axis_number(tick));
  svg += text_at(width - kRight, kHeight - 4, "end", chart.x_title);
  for (const Mark& mark : chart.marks) {
    if (mark.x < x.low || mark.x > x.high) continue;
    svg += format("<path class=\"mark {}\" d=\"M{:.1f} {}V{}\"><title>{} at {}</title></path>\n",
                  escaped(mark.kind), at_x(mark.x), kTop, kHeight - kBottom, escaped(mark.kind),
                  axis_number(mark.x));
  }
  for (const Line& all : chart.lines) {
    const Line line = thinned(all);
    std::string path;
    bool pen = false;
    for (size_t i = 0; i < line.x.size(); ++i) {
      const double value = scaled(line.y[i]);
      if (!std::isfinite(value) || !std::isfinite(line.x[i])) {
        pen = false;
        continue;
      }
      path += format("{}{:.1f} {:.1f}", pen ? 'L' : 'M', at_x(line.x[i]), at_y(value));
      pen = true;
      if (line.dots)
        svg += format(
            "<circle class=\"f{}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\"><title>{}: {} at "
            "{}</title></circle>",
            line.colour % 8, at_x(line.x[i]), at_y(value), escaped(line.name),
            axis_number(line.y[i]), axis_number(line.x[i]));
    }
    svg += format("<path class=\"line s{}{}\" d=\"{}\"><title>{}</title></path>\n", line.colour % 8,
                  line.dots ? " dashed" : "", path, escaped(line.name));
  }
  return svg + "</svg>\n";
}

std::string to_svg(const Bars& bars) {
  constexpr double kRow = 26, kHeightOfBar = 18, kName = 124, kNote = 116;
  double longest = 0;
  for (const Bars::Row& row : bars.rows) {
    double sum = 0;
    for (const Bars::Part& part : row.parts) sum += std::max(0.0, part.value);
    longest = std::max(longest, sum);
  }
  if (longest <= 0) return "";
  const double width = bars.width - kName - kNote;
  const double height = kRow * static_cast<double>(bars.rows.size()) + 4;
  std::string svg =
      format("<svg class=\"plot\" viewBox=\"0 0 {} {:.0f}\" role=\"img\" aria-label=\"{}\">\n",
             bars.width, height, escaped(bars.title));
  double y = 2;
  for (const Bars::Row& row : bars.rows) {
    svg += text_at(kName - 8, y + 14, "end", row.name);
    double x = kName;
    for (const Bars::Part& part : row.parts) {
      const double length = std::max(0.0, part.value) / longest * width;
      if (length < 0.05) continue;
      svg += format(
          "<rect class=\"{}\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" "
          "height=\"{}\"><title>{}</title></rect>",
          part.style, x, y, length, kHeightOfBar, escaped(part.name));
      x += length;
    }
    svg += text_at(x + 6, y + 14, "start", row.note, " class=\"dim\"") + "\n";
    y += kRow;
  }
  return svg + "</svg>\n";
}

std::string to_svg(const HeatMap& map) {
  if (map.values.empty() || map.columns.empty()) return "";
  Range range;
  const auto scaled = [&](double value) {
    return !map.log    ? value
           : value > 0 ? std::log10(value)
                       : std::numeric_limits<double>::quiet_NaN();
  };
  for (const auto& row : map.values) {
    for (const double value : row) range.add(scaled(value));
  }
  if (range.empty()) return "";
  constexpr double kName = 120, kLegend = 30, kHeightOfMap = 240;
  const double cell = (map.width - kName - kRight) / static_cast<double>(map.columns.size());
  const double row_height =
      std::clamp(kHeightOfMap / static_cast<double>(map.values.size()), 5.0, 22.0);
  const double height = row_height * static_cast<double>(map.values.size()) + 22 + kLegend;
  std::string svg =
      format("<svg class=\"plot\" viewBox=\"0 0 {} {:.0f}\" role=\"img\" aria-label=\"{}\">\n",
             map.width, height, escaped(map.title));
  const auto step = static_cast<size_t>(std::ceil(11 / row_height));
  std::array<std::string, 10> paths;
  for (size_t row = 0; row < map.values.size(); ++row) {
    const double y = 2 + row_height * static_cast<double>(row);
    if (row % step == 0) svg += text_at(kName - 6, y + row_height / 2 + 4, "end", map.rows[row]);
    for (size_t i = 0; i < map.values[row].size(); ++i) {
      const double value = scaled(map.values[row][i]);
      if (!std::isfinite(value)) continue;
      // Cells of one colour are one path: a tenth of the text.
      paths[static_cast<size_t>(std::lround(range.at(value) * 9))] +=
          format("M{:.1f} {:.1f}h{:.1f}v{:.1f}h-{:.1f}z", kName + cell * static_cast<double>(i), y,
                 cell + 0.3, row_height - 0.6, cell + 0.3);
    }
  }
  for (size_t i = 0; i < paths.size(); ++i)
    svg += format("<path class=\"h{}\" d=\"{}\"/>\n", i, paths[i]);
  const double bottom = 2 + row_height * static_cast<double>(map.values.size());
  const size_t labels = std::max<size_t>(1, (map.columns.size() + 7) / 8);
  for (size_t i = 0; i < map.columns.size(); i += labels)
    svg += text_at(kName + cell * (static_cast<double>(i) + 0.5), bottom + 15, "middle",
                   map.columns[i]);
  for (int i = 0; i < 10; ++i)
    svg += format("<rect class=\"h{}\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"20\" height=\"8\"/>", i,
                  kName + 60 + 20 * i, bottom + 28);
  const auto shown = [&](double value) {
    return axis_number(map.log ? std::pow(10, value) : value);
  };
  svg += text_at(kName + 54, bottom + 36, "end", shown(range.low)) +
         text_at(kName + 266, bottom + 36, "start", shown(range.high) + map.unit);
  return svg + "</svg>\n";
}

}  // namespace lockstep::report
