// SPDX-License-Identifier: Apache-2.0
#include "lockstep/flight/fault_text.h"

namespace lockstep::flight {

std::vector<std::string> parts_of_fault(std::string_view text, char separator) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == separator) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

std::string FaultText::value(const std::string& key) const {
  const auto found = values.find(key);
  return found == values.end() ? "" : found->second;
}

std::vector<FaultText> parse_fault_texts(std::string_view text) {
  std::vector<FaultText> faults;
  for (const std::string& entry : parts_of_fault(text, ';')) {
    FaultText fault{.text = entry, .values = {}};
    if (!entry.empty()) {
      for (const std::string& word : parts_of_fault(entry, ',')) {
        const size_t equals = word.find('=');
        const std::string value = equals == std::string::npos ? "" : word.substr(equals + 1);
        fault.repeats |= !fault.values.try_emplace(word.substr(0, equals), value).second;
      }
    }
    faults.push_back(std::move(fault));
  }
  return faults;
}

}  // namespace lockstep::flight
