// SPDX-License-Identifier: Apache-2.0
// A running job, seen from another shell.
#pragma once

#include <string>

namespace lockstep::report {

// What the job does now: its last steps, what each rank computes or waits for, who is slow. Reads
// the ends of the run's files, and the flight recorders of ranks on this host.
std::string watch_frame(const std::string& folder, int columns, int rows);

// Draws frames in place until the run ends or q is pressed. Without a terminal: one frame.
void watch(const std::string& folder);

}  // namespace lockstep::report
