// SPDX-License-Identifier: Apache-2.0
// What a configuration file says, before anybody asks whether it makes sense. Private: not
// installed.
#pragma once

#include <string>
#include <vector>

#include "lockstep/config/value.h"

namespace lockstep::config {

struct Setting {
  std::string name;  // with its section: "train.steps"
  Value value;
  int line = 0;  // 0: not known
};

// The part of TOML that option files need: comments, [sections], dotted keys, strings, numbers,
// true and false, lists of numbers. Anything else is a ConfigError with the line.
std::vector<Setting> read_toml(const std::string& text, const std::string& path);

// Objects within objects, or keys with dots, or both.
std::vector<Setting> read_json(const std::string& text, const std::string& path);

}  // namespace lockstep::config
