// SPDX-License-Identifier: Apache-2.0
#include "lockstep/report/csv.h"

#include <array>
#include <fstream>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/io/json.h"
#include "lockstep/report/run.h"

namespace lockstep::report {

int64_t write_csv(const std::string& metrics_file, std::ostream& out) {
  static constexpr std::array kKeys{"step",      "time",       "tokens",         "loss",
                                    "grad_norm", "lr",         "tokens_per_s",   "step_ms",
                                    "comm_ms",   "peak_bytes", "validation_loss"};
  std::ifstream file(metrics_file);
  if (!file) throw ConfigError(format("report: cannot read {}", metrics_file));
  for (const char* const key : kKeys) out << (key == kKeys[0] ? "" : ",") << key;
  for (const std::string_view name : kSplitNames) out << ',' << name << "_ms";
  out << '\n';
  int64_t steps = 0;
  for (std::string line; std::getline(file, line);) {
    const io::Json json = io::parse_json_line(line);
    if (!json.is_object() || !json.contains("step")) continue;
    const auto number = [&](const io::Json& object, const std::string& key) {
      const auto found = object.find(key);
      return found != object.end() && found->is_number() ? found->dump() : std::string();
    };
    for (const char* const key : kKeys) out << (key == kKeys[0] ? "" : ",") << number(json, key);
    const io::Json split = json.value("split", io::Json::object());
    for (const std::string_view name : kSplitNames)
      out << ',' << (split.is_object() ? number(split, std::string(name) + "_ms") : "");
    out << '\n';
    ++steps;
  }
  return steps;
}

}  // namespace lockstep::report
