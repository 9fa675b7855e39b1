// SPDX-License-Identifier: Apache-2.0
// A Gantt chart in plain SVG: presentation attributes only, and the fonts that are there.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <set>

#include "lockstep/core/format.h"
#include "lockstep/schedule/render/render.h"

namespace lockstep::schedule {
namespace {

// Sizes in pixels.
constexpr double kLeft = 64, kRight = 92, kTop = 40, kRowStep = 30, kRowHeight = 24;
constexpr double kNarrowest = 760, kWidest = 2400;  // of the part that has a scale
constexpr double kLegendHeight = 22, kAxisHeight = 40;
constexpr double kFont = 12, kBarFont = 11, kDigit = 6.6;  // kDigit: width in the bars' font

struct Colour {
  int red, green, blue;

  std::string hex() const { return format("#{:02x}{:02x}{:02x}", red, green, blue); }
  // Which of black and white can be read on it.
  const char* text() const {
    return 299 * red + 587 * green + 114 * blue > 140'000 ? "#1a1a1a" : "#ffffff";
  }
};

struct Style {
  Op op;
  const char* name;
  Colour first, last;  // of the first chunk and of the last
};
constexpr std::array<Style, 4> kStyles = {{
    {Op::forward, "F forward", {31, 96, 173}, {168, 205, 245}},
    {Op::backward, "B backward", {24, 118, 58}, {150, 214, 160}},
    {Op::backward_input, "I input gradient", {20, 140, 125}, {157, 226, 214}},
    {Op::backward_weight, "W weight gradient", {214, 106, 11}, {252, 205, 150}},
}};

const Style& style_of(Op op) { return kStyles.at(static_cast<size_t>(op)); }

Colour colour_of(Op op, int chunk, int chunks) {
  const auto& [first, last] = std::pair(style_of(op).first, style_of(op).last);
  const double part = chunks > 1 ? static_cast<double>(chunk) / (chunks - 1) : 0;
  const auto mix = [&](int a, int b) { return static_cast<int>(std::lround(a + part * (b - a))); };
  return {mix(first.red, last.red), mix(first.green, last.green), mix(first.blue, last.blue)};
}

std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : text) {
    if (c == '&') {
      result += "&amp;";
    } else if (c == '<') {
      result += "&lt;";
    } else {
      result += c;
    }
  }
  return result;
}

// 1, 2 or 5 times a power of ten, so that there are about ten ticks.
double tick_step(double length) {
  const double power = std::pow(10, std::floor(std::log10(length / 10)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (length / (factor * power) <= 12) return factor * power;
  }
  return 10 * power;
}

class Drawing {
 public:
  explicit Drawing(const Chart& chart) : chart_(chart) {
    std::vector<double> widths;
    for (const Bar& bar : chart.bars) {
      if (!is_computation(bar.action.op)) continue;
      length_ = std::max(length_, bar.end);
      rows_ = std::max(rows_, bar.rank + 1);
      widths.push_back(bar.end - bar.start);
    }
    if (length_ <= 0) length_ = 1;
    // Wide enough for two digits in the median bar.
    double median = length_;
    if (!widths.empty()) {
      const auto middle = widths.begin() + static_cast<ptrdiff_t>(widths.size() / 2);
      std::nth_element(widths.begin(), middle, widths.end());
      median = std::max(*middle, length_ / kWidest);
    }
    plot_ = std::clamp(length_ / median * (2 * kDigit + 4), kNarrowest, kWidest);
    scale_ = plot_ / length_;
  }

  std::string svg() {
    const double bottom = kTop + rows_ * kRowStep;
    const double legend = bottom + kAxisHeight;
    draw_rows();
    for (const Bar& bar : chart_.bars) {
      if (is_computation(bar.action.op)) draw(bar);
    }
    draw_axis(bottom);
    const double height = draw_legend(legend) + kLegendHeight;
    const double width = kLeft + plot_ + kRight;
    return format(
               "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" "
               "viewBox=\"0 0 {0:.0f} {1:.0f}\" font-family=\"sans-serif\" font-size=\"{2}\">\n"
               "<rect width=\"{0:.0f}\" height=\"{1:.0f}\" fill=\"#ffffff\"/>\n",
               width, height, kFont) +
           label(kLeft, 24, chart_.title, "start", "#1a1a1a", " font-weight=\"bold\"") + body_ +
           "</svg>\n";
  }

 private:
  static std::string label(double x, double y, const std::string& text, const char* anchor,
                           const char* fill, const char* more = "") {
    return format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\" fill=\"{}\"{}>{}</text>\n", x,
                  y, anchor, fill, more, escaped(text));
  }
  static double row_top(int rank) { return kTop + rank * kRowStep; }

  // What is not covered by bars is idle time.
  void draw_rows() {
    for (int rank = 0; rank < rows_; ++rank) {
      const double middle = row_top(rank) + kRowHeight / 2 + 4;
      body_ += format(
          "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" fill=\"#eceef1\"/>\n",
          kLeft, row_top(rank), plot_, kRowHeight);
      body_ += label(kLeft - 8, middle, format("rank {}", rank), "end", "#1a1a1a");
      if (static_cast<size_t>(rank) < chart_.notes.size()) {
        body_ += label(kLeft + plot_ + 8, middle, chart_.notes[rank], "start", "#1a1a1a");
      }
    }
  }

  void draw(const Bar& bar) {
    const auto& [op, microbatch, chunk] = bar.action;
    const Colour colour = colour_of(op, chunk, chart_.chunks);
    const double x = kLeft + bar.start * scale_, width = (bar.end - bar.start) * scale_;
    const double y = row_top(bar.rank);
    body_ += format(
        "<rect x=\"{:.2f}\" y=\"{:.1f}\" width=\"{:.2f}\" height=\"{:.1f}\" fill=\"{}\" "
        "stroke=\"#ffffff\" stroke-width=\"{}\"><title>{} {:.6g} to {:.6g}</title></rect>\n",
        x, y, width, kRowHeight, colour.hex(), width > 4 ? "0.8" : "0.2",
        name_of(bar.action, chart_.chunks), bar.start, bar.end);
    const std::string number = std::to_string(microbatch);
    if (width >= static_cast<double>(number.size()) * kDigit + 2) {
      body_ += label(x + width / 2, y + kRowHeight / 2 + 4, number, "middle", colour.text(),
                     format(" font-size=\"{}\"", kBarFont).c_str());
    }
  }

  void draw_axis(double y) {
    body_ += format("<path d=\"M{:.1f} {:.1f}h{:.1f}\" stroke=\"#5f6670\"/>\n", kLeft, y, plot_);
    const double step = tick_step(length_);
    for (int tick = 0; tick * step <= length_ * (1 + 1e-9); ++tick) {
      const double x = kLeft + tick * step * scale_;
      body_ += format("<path d=\"M{:.1f} {:.1f}v5\" stroke=\"#5f6670\"/>\n", x, y);
      body_ += label(x, y + 18, format("{:.6g}", tick * step), "middle", "#5f6670");
    }
    body_ +=
        label(kLeft + plot_ + 8, y + 18,
              chart_.unit.empty() ? "time" : format("time, {}", chart_.unit), "start", "#5f6670");
  }

  // One line per op, one box per chunk. Returns where it ends.
  double draw_legend(double y) {
    std::set<std::pair<Op, int>> used;
    for (const Bar& bar : chart_.bars) {
      if (is_computation(bar.action.op)) used.emplace(bar.action.op, bar.action.chunk);
    }
    double x = kLeft;
    for (const auto& [op, chunk] : used) {
      std::string text = style_of(op).name;
      if (chart_.chunks > 1) text += format(", chunk {}", chunk);
      const double width = 22 + static_cast<double>(text.size()) * 6.4 + 14;
      if (x + width > kLeft + plot_ && x > kLeft) {
        x = kLeft;
        y += kLegendHeight;
      }
      body_ += format("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"16\" height=\"12\" fill=\"{}\"/>\n",
                      x, y - 10, colour_of(op, chunk, chart_.chunks).hex());
      body_ += label(x + 22, y, text, "start", "#1a1a1a");
      x += width;
    }
    return y;
  }

  const Chart& chart_;
  double length_ = 0, plot_ = 0, scale_ = 0;
  int rows_ = 0;
  std::string body_;
};

}  // namespace

std::string to_svg(const Chart& chart) { return Drawing(chart).svg(); }

}  // namespace lockstep::schedule
