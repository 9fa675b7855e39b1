// SPDX-License-Identifier: Apache-2.0
// The traces of all ranks as one, for Perfetto.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

namespace lockstep::report {

// The traces of each run in the folder, or in its folder traces/: the newest run first.
std::vector<std::vector<std::string>> trace_files(const std::string& folder);

struct TraceCounts {
  int64_t events = 0, messages = 0, waits = 0;  // flows of the last two
};
// Writes one JSON array: the events of all files, on the clock of the first, and flows: from each
// send to its receive, and from each operation to the thread that waited for its end.
TraceCounts merge_traces(const std::vector<std::string>& files, std::ostream& out);

}  // namespace lockstep::report
