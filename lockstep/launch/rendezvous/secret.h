// SPDX-License-Identifier: Apache-2.0
// The user's secret, from which the tokens of jobs are made.
#pragma once

#include <string>

namespace lockstep::launch {

// From the file LOCKSTEP_TOKEN_FILE, else from the variable LOCKSTEP_TOKEN; empty if there is none.
// Throws as token_from_file does.
std::string secret_from_environment();

// A token for one job of many that have the same secret, or none.
std::string token_for_job(const std::string& secret, const std::string& job);

}  // namespace lockstep::launch
