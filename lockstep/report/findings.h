// SPDX-License-Identifier: Apache-2.0
// What a reader of a run's report wants to know first: where the time goes, who is slow, whether
// memory is as planned, and what to try.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "lockstep/report/run.h"

namespace lockstep::report {

struct Share {
  std::string name;
  double ms = 0;    // of a step, on average
  double part = 0;  // of the time that training takes
};

// Of the parts of a step that were measured, the largest first.
std::vector<Share> shares(const Run& run);

// The mean busy time of each rank in the last steps; empty with one rank.
std::vector<double> busy_of_ranks(const Run& run);
// Ranks whose mean is at least 1.3 times the median of all.
std::vector<int> stragglers(const Run& run);

// The part of the time of collectives in which the rank computed; kNone without any.
double overlap(const Run& run);

struct Finding {
  bool is_problem = false;
  std::string text = {};  // what is seen, with its values
  std::string advice = {};
};
// The most important first.
std::vector<Finding> findings(const Run& run);

// "1.23k", "4.56M"; "12.3 MB"; "2h05m"
std::string short_count(double value);
std::string short_size(double bytes);
std::string short_duration(double seconds);

}  // namespace lockstep::report
