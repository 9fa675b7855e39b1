// SPDX-License-Identifier: Apache-2.0
// A report as one HTML file: no server, no request, no script but its own.
#pragma once

#include <string>
#include <vector>

#include "lockstep/report/run.h"

namespace lockstep::report {

// How many rows of steps read_run() should keep, so that a page with this many runs stays small.
size_t rows_of_page(size_t runs);

// Several runs are laid over each other; what belongs to one is shown for each.
std::string page(const std::vector<Run>& runs);

}  // namespace lockstep::report
