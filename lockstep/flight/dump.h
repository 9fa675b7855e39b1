// SPDX-License-Identifier: Apache-2.0
// Flights as files: one for each rank, JSON with an operation in each line.
#pragma once

#include <string>
#include <vector>

#include "lockstep/flight/flight.h"

namespace lockstep::flight {

// FOLDER/flight-rank<R>.json, made new. SystemError where it cannot be written.
std::string dump_path(const std::string& folder, int rank);
void write_dump(const std::string& folder, int rank, const Flight& flight);

// Those of one folder, or of the newest of its folders that has any: a folder of logs has one for
// each attempt and rank. ConfigError where there is none, or where a file is not a dump.
std::vector<Flight> read_dumps(const std::string& folder);

}  // namespace lockstep::flight
