// SPDX-License-Identifier: Apache-2.0
// A schema as text: help, documentation, and its values as files.
#pragma once

#include <string>

#include "lockstep/config/schema/schema.h"

namespace lockstep::config {

// Flags by section, with defaults, in 98 columns.
std::string help_text(const Schema& schema);
// A table for each section.
std::string markdown_text(const Schema& schema);
// The values as they are now, and who set them; reading it gives the same values.
std::string toml_text(const Schema& schema);
std::string json_text(const Schema& schema);

}  // namespace lockstep::config
