// SPDX-License-Identifier: Apache-2.0
// A run in a terminal.
#pragma once

#include <string>
#include <vector>

#include "lockstep/report/run.h"

namespace lockstep::report {

// One screen: what the run is, where the time goes, who is slow, memory against the plan, what to
// try; of a run that failed, which rank left the common order first.
std::string text_report(const Run& run, int width = 100);
// A line for each run, with its state, steps, losses and speed.
std::string table_of_runs(const std::vector<Run>& runs);
// Which rank left the common order first, and what each was doing.
std::string text_of_flights(const std::vector<flight::Flight>& flights);

}  // namespace lockstep::report
