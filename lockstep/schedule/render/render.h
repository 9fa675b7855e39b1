// SPDX-License-Identifier: Apache-2.0
// Schedules as files, text and pictures.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "lockstep/schedule/lower.h"
#include "lockstep/schedule/schedule.h"
#include "lockstep/schedule/simulate.h"

namespace lockstep::schedule {

// "placement,loop" or "placement,v", then a line per rank with its actions, separated by commas.
std::string to_csv(const Schedule& schedule);

// The opposite; the kind is file, the numbers are those that the actions have. Throws ConfigError
// with the path, the line and the action where the text or the schedule is not valid.
Schedule from_csv(std::string_view text, const std::string& path);
Schedule read_csv(const std::string& path);

// "4 ranks, 8 micro-batches, 2 chunks per rank"
std::string describe(const Pipeline& pipeline);

// The actions of one rank, separated by spaces.
std::string ops(const std::vector<Action>& actions, int chunks);

// A line of actions per rank, and the numbers of the simulation. The program's actions are those of
// all ops; `of` is what it was lowered from.
std::string to_text(const Schedule& schedule, const Simulation& simulation);
std::string to_text(const Program& program, const Simulation& of);

// One object: kind, stages (ranks), microbatches, chunks, the numbers of the simulation, and ops:
// a string per rank.
std::string to_json(const Schedule& schedule, const Simulation& simulation);

// A box of a Gantt chart.
struct Bar {
  int rank = 0;
  Action action = {};
  double start = 0, end = 0;
};

struct Chart {
  std::string title;
  std::string unit = {};                // of time; empty: that of the costs
  int chunks = 1;                       // of each rank
  std::vector<std::string> notes = {};  // of each rank, at the end of its row
  std::vector<Bar> bars = {};
};

struct ChartLabels {
  std::string name = {};  // the title begins with it; empty: the kind
  std::string unit = {};  // of time
};

Chart to_chart(const Schedule& schedule, const Simulation& simulation,
               const ChartLabels& labels = {});

// A row per rank, with its computations only; colours by op and chunk, numbers of micro-batches.
std::string to_svg(const Chart& chart);

}  // namespace lockstep::schedule
