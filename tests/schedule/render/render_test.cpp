// SPDX-License-Identifier: Apache-2.0
#include "lockstep/schedule/render/render.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>

#include "tests/support/says.h"

namespace lockstep::schedule {
namespace {

using test::says;
using ::testing::HasSubstr;
using ::testing::Not;

int count(const std::string& text, const std::string& part) {
  int found = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

TEST(Render, Text) {
  const Schedule schedule = generate({Kind::zb_h2, 2, 3});
  const Simulation simulation = simulate(schedule, uniform({}));
  EXPECT_EQ(to_text(schedule, simulation),
            "zb-h2: 2 ranks, 3 micro-batches, 1 chunk per rank\n"
            "rank 0: F0 F1 F2 I0 W0 I1 W1 I2 W2\n"
            "rank 1: F0 I0 F1 I1 F2 I2 W0 W1 W2\n"
            "makespan 10\n"
            "spans 9 9\n"
            "bubble 0.100000 of the makespan, 0.000000 of the longest span\n"
            "peak live 3 3\n");
  EXPECT_THAT(to_text(lower(schedule), simulation),
              HasSubstr("rank 0: F0 SA0 F1 SA1 RG0 F2 SA2 I0 RG1 W0"));
}

TEST(Render, Json) {
  const Schedule schedule = generate({Kind::interleaved, 2, 2, 2});
  const auto json = nlohmann::json::parse(to_json(schedule, simulate(schedule, uniform({}))));
  const nlohmann::json expected = {
      {"kind", "interleaved"},
      {"stages", 2},
      {"microbatches", 2},
      {"chunks", 2},
      {"makespan", 15.0},
      {"span", {15.0, 12.0}},
      {"bubble_makespan", 1 - 12.0 / 15},
      {"bubble_span", 1 - 12.0 / 15},
      {"peak_live", {4, 3}},
      {"ops",
       {"F0.0 F1.0 F0.1 F1.1 B0.1 B1.1 B0.0 B1.0", "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 B0.0 B1.0"}}};
  EXPECT_EQ(json, expected);
}

TEST(Render, Chart) {
  const Schedule schedule = generate({Kind::zb_v, 2, 3, 2});
  const Simulation simulation = simulate(schedule, uniform({}));
  const Chart chart = to_chart(schedule, simulation);
  EXPECT_THAT(
      chart.title,
      says("zb-v: 2 ranks, 3 micro-batches, 2 chunks per rank; makespan 19, bubble 5.3% (0.0%"));
  EXPECT_EQ(chart.chunks, 2);
  EXPECT_EQ(chart.notes, (std::vector<std::string>{"peak live 4", "peak live 4"}));
  ASSERT_EQ(chart.bars.size(), 36u);
  EXPECT_EQ(chart.bars[18].rank, 1);
  EXPECT_EQ(chart.bars[18].start, 1);
  EXPECT_EQ(chart.bars[18].end, 2);
  // The two bubbles of 1f1b are the same: one number.
  const Schedule plain = generate({Kind::one_f_one_b, 2, 2});
  EXPECT_EQ(to_chart(plain, simulate(plain, uniform({}))).title,
            "1f1b: 2 ranks, 2 micro-batches, 1 chunk per rank; makespan 9, bubble 33.3%");
}

// The boxes that have a tooltip, by the tooltip.
struct Box {
  double x, y, width;
  std::string fill;
};

std::map<std::string, Box> boxes(const std::string& svg) {
  std::map<std::string, Box> found;
  std::istringstream lines(svg);
  for (std::string line; std::getline(lines, line);) {
    const auto title = line.find("<title>");
    if (title == std::string::npos) continue;
    const auto value = [&](const std::string& attribute) {
      const auto begin = line.find(" " + attribute + "=\"") + attribute.size() + 3;
      return line.substr(begin, line.find('"', begin) - begin);
    };
    const std::string tip = line.substr(title + 7, line.find("</title>") - title - 7);
    found[tip] = {std::stod(value("x")), std::stod(value("y")), std::stod(value("width")),
                  value("fill")};
  }
  return found;
}

TEST(Render, BoxesAreToScale) {
  const Chart chart{.title = "a < b & c",
                    .unit = "ms",
                    .chunks = 2,
                    .notes = {"first", "second"},
                    .bars = {{0, {Op::forward, 12, 0}, 0, 10},
                             {1, {Op::backward, 12, 1}, 10, 30},
                             {0, {Op::recv_gradient, 12, 0}, 30, 90},
                             {0, {Op::backward_weight, 345, 0}, 39.999, 40}}};
  const std::string svg = to_svg(chart);
  const auto found = boxes(svg);
  ASSERT_EQ(found.size(), 3u);
  const auto& forward = found.at("F12.0 0 to 10");
  const auto& backward = found.at("B12.1 10 to 30");
  EXPECT_NEAR(backward.width, 2 * forward.width, 0.02);
  EXPECT_NEAR(backward.x, forward.x + forward.width, 0.02);
  EXPECT_GT(backward.y, forward.y);
  EXPECT_THAT(svg, HasSubstr("a &lt; b &amp; c"));
  EXPECT_THAT(svg, HasSubstr("time, ms"));
  EXPECT_THAT(svg, HasSubstr(">second<"));
  EXPECT_THAT(svg, HasSubstr("F forward, chunk 0"));
  EXPECT_THAT(svg, HasSubstr("B backward, chunk 1"));
  EXPECT_THAT(svg, Not(HasSubstr("I input")));
  EXPECT_EQ(count(svg, ">12<"), 2);
  EXPECT_THAT(svg, Not(HasSubstr(">345<"))) << "no room for it";
  EXPECT_THAT(svg, Not(HasSubstr("<style")));
  EXPECT_THAT(svg, Not(HasSubstr("nan")));
}

TEST(Render, ChunksAndOpsDifferInColour) {
  Chart chart{.title = "", .chunks = 3};
  for (const Op op : {Op::forward, Op::backward, Op::backward_input, Op::backward_weight}) {
    for (int chunk = 0; chunk < 3; ++chunk) {
      const double start = static_cast<double>(chart.bars.size());
      chart.bars.push_back({0, {op, 0, chunk}, start, start + 1});
    }
  }
  std::set<std::string> colours;
  for (const auto& [tip, box] : boxes(to_svg(chart))) colours.insert(box.fill);
  EXPECT_EQ(colours.size(), 12u);
}

TEST(Render, AnEmptyChartIsAPicture) {
  EXPECT_THAT(to_svg({.title = "nothing"}), HasSubstr(">nothing<"));
  EXPECT_THAT(to_svg({.title = "", .bars = {{0, {Op::forward, 0, 0}, 0, 0}}}),
              Not(HasSubstr("nan")));
}

}  // namespace
}  // namespace lockstep::schedule
