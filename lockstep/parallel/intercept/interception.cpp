// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/intercept/interception.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::parallel::detail {
namespace {

constexpr const char* kVariable = "LOCKSTEP_INTERCEPT";
constexpr std::array<std::string_view, 3> kNames{"operators", "saved_tensors", "faults"};

std::string_view value() {
  const char* const given = std::getenv(kVariable);
  return given == nullptr || *given == '\0' ? "all" : given;
}

}  // namespace

bool is_allowed(Interception interception) {
  const std::string_view list = value();
  if (list == "all") return true;
  if (list == "none") return false;
  bool allowed = false;
  for (size_t begin = 0; begin <= list.size();) {
    const size_t end = std::min(list.find(',', begin), list.size());
    const std::string_view name = list.substr(begin, end - begin);
    if (std::find(kNames.begin(), kNames.end(), name) == kNames.end()) {
      throw ConfigError(
          format("{} is '{}', must be all, none or a list of {}", kVariable, list, join(kNames)));
    }
    allowed = allowed || name == kNames[static_cast<size_t>(interception)];
    begin = end + 1;
  }
  return allowed;
}

void require_allowed(Interception interception, std::string_view feature) {
  if (is_allowed(interception)) return;
  throw ConfigError(
      format("[{}] {} is '{}', which leaves torch's {} alone, but {} needs them: add {} to it, or "
             "do without (docs/gotchas.md says what is lost)",
             feature, kVariable, value(), kNames[static_cast<size_t>(interception)], feature,
             kNames[static_cast<size_t>(interception)]));
}

}  // namespace lockstep::parallel::detail
