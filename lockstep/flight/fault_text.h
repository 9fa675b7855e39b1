// SPDX-License-Identifier: Apache-2.0
// LOCKSTEP_FAULT: faults on purpose, for tests. CONTRIBUTING.md has the forms. Private: not
// installed.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::flight {

inline constexpr const char* kFaultVariable = "LOCKSTEP_FAULT";

// One of several, separated by semicolons: "key=value,key=value".
struct FaultText {
  std::string text;
  std::map<std::string, std::string> values;
  bool repeats = false;  // a key

  bool has(const std::string& key) const { return values.contains(key); }
  std::string value(const std::string& key) const;  // empty where there is none
};

std::vector<FaultText> parse_fault_texts(std::string_view text);
// The parts of a text, the last one too where it is empty.
std::vector<std::string> parts_of_fault(std::string_view text, char separator);

}  // namespace lockstep::flight
