// SPDX-License-Identifier: Apache-2.0
// Pictures in SVG, without a script. Colours are those of the page's style sheet, for light and
// dark.
#pragma once

#include <string>
#include <vector>

namespace lockstep::report {

// Pixels of a picture that fills the page, and of one of two side by side: text has one size.
inline constexpr double kFullWidth = 1130, kHalfWidth = 540;

struct Line {
  std::string name;
  int colour = 0;  // of the page, 0 to 7
  std::vector<double> x = {}, y = {};
  bool dots = false;  // few values, each of which counts
};

struct Mark {  // a vertical line
  double x = 0;
  std::string kind;
};

struct LineChart {
  std::string title, x_title = "step", y_title = {};
  bool log = false;
  std::vector<Line> lines = {};
  std::vector<Mark> marks = {};
  double width = kHalfWidth;
};
// Empty without a value.
std::string to_svg(const LineChart& chart);

// A row of stacked parts for each name.
struct Bars {
  struct Part {
    std::string name;
    std::string style;  // a class of the style sheet
    double value = 0;
  };
  struct Row {
    std::string name, note = {};
    std::vector<Part> parts = {};
  };
  std::string title;
  std::vector<Row> rows = {};
  double width = kHalfWidth;
};
std::string to_svg(const Bars& bars);

// Rows of cells, dark where a value is great. A value that is not finite leaves its cell empty.
struct HeatMap {
  std::string title;
  std::vector<std::string> rows = {};
  std::vector<std::string> columns = {};         // labels, shown where there is room
  std::vector<std::vector<double>> values = {};  // by row
  bool log = false;
  std::string unit = {};
  double width = kHalfWidth;
};
std::string to_svg(const HeatMap& map);

// "0.00123", "12.3k": for axes.
std::string axis_number(double value);

}  // namespace lockstep::report
