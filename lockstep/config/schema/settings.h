// SPDX-License-Identifier: Apache-2.0
// What a configuration file says, before anybody asks whether it makes sense. Private: not
// installed.
#pragma once

#include <string>
#include <vector>

#include "lockstep/config/schema/option_value.h"

namespace lockstep::config {

struct Setting {
  std::string name;  // with its section: "train.steps"
  Value value;
  int line = 0;  // 0: not known
};

// The part of TOML that option files need: comments, [sections], dotted and quoted keys, strings on
// one line, numbers, true and false, lists of numbers on one line. Anything else is a ConfigError
// with the line. Debian's toml11 would do, but machines where nothing can be installed do not have
// it, and a build there must read the same files.
std::vector<Setting> read_toml(const std::string& text, const std::string& path);

// Objects within objects, or keys with dots, or both.
std::vector<Setting> read_json(const std::string& text, const std::string& path);

}  // namespace lockstep::config
