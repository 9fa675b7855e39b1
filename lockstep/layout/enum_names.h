// SPDX-License-Identifier: Apache-2.0
// Names of enum values, for configuration files and messages. Private: not installed.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <string_view>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::layout {

// `names` holds one name per value, in order; the values count up from 0.
template <class Enum, size_t N>
std::string_view enum_name(const std::array<std::string_view, N>& names, Enum value) {
  return names.at(static_cast<size_t>(value));
}

template <class Enum, size_t N>
Enum parse_enum(std::string_view what, const std::array<std::string_view, N>& names,
                std::string_view text) {
  const auto found = std::find(names.begin(), names.end(), text);
  if (found == names.end()) {
    throw ConfigError(format("[{}] '{}' is unknown, must be one of {}", what, text, join(names)));
  }
  return static_cast<Enum>(found - names.begin());
}

}  // namespace lockstep::layout
