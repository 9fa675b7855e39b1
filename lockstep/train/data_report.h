// SPDX-License-Identifier: Apache-2.0
// What a run says of its data when it starts. Private: not installed.
#pragma once

#include <string>

#include "lockstep/config/input_files.h"

namespace lockstep::train {

// "360 examples in 1 file, ...; 40 examples held out; end of text </s> (2)"
std::string describe(const config::Data& data);

// Warnings: examples that are cut or left out, completions without an end of text, and a fraction
// that holds out no example.
void warn_of_data(const config::Data& data, const config::TrainConfig& config);

}  // namespace lockstep::train
