// SPDX-License-Identifier: Apache-2.0
#include <cstdint>

#include "lockstep/config/schema/settings.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/io/json.h"

namespace lockstep::config {
namespace {

using Json = io::OrderedJson;

Value value_of(const Json& json, const std::string& name, const std::string& path) {
  if (json.is_boolean()) return json.get<bool>();
  // One that is too large becomes a floating-point number, which no whole number's option takes.
  if (json.is_number_integer() &&
      (!json.is_number_unsigned() || json.get<uint64_t>() <= uint64_t{INT64_MAX}))
    return json.get<int64_t>();
  if (json.is_number()) return json.get<double>();
  if (json.is_string()) return json.get<std::string>();
  if (json.is_array()) {
    std::vector<double> numbers;
    for (const Json& item : json) {
      if (!item.is_number()) break;
      numbers.push_back(item.get<double>());
    }
    if (numbers.size() == json.size()) return numbers;
  }
  throw ConfigError(
      format("{}: {} is {}, must be a number, a string, true, false or a list of "
             "numbers",
             path, name, json.dump()));
}

void collect(const Json& object, const std::string& prefix, const std::string& path,
             std::vector<Setting>& settings) {
  for (const auto& [key, item] : object.items()) {
    const std::string name = prefix.empty() ? key : format("{}.{}", prefix, key);
    if (item.is_object()) {
      collect(item, name, path, settings);
    } else {
      settings.push_back({name, value_of(item, name, path)});
    }
  }
}

}  // namespace

std::vector<Setting> read_json(const std::string& text, const std::string& path) {
  std::vector<Setting> settings;
  collect(io::parse_user_json(text, path), "", path, settings);
  return settings;
}

}  // namespace lockstep::config
