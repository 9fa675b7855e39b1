// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/outcome.h"

#include <cstdio>

#include "lockstep/core/format.h"

namespace lockstep::launch {

bool restart_may_help(int code) {
  return code != 2 && code != 74 && code != 75 && code != 78 && code != 93;
}

std::string pack(const Outcome& outcome) {
  return format("{} {} {} {} {}\n{}", static_cast<int>(outcome.kind), outcome.code,
                outcome.restartable ? 1 : 0, outcome.step, outcome.ran_ms, outcome.text);
}

std::optional<Outcome> unpack_outcome(std::string_view text) {
  int kind = 0, code = 0, restartable = 0;
  long step = -1, ran_ms = 0;
  const size_t end = text.find('\n');
  if (end == std::string_view::npos) return std::nullopt;
  const std::string head(text.substr(0, end));
  if (std::sscanf(head.c_str(), "%d %d %d %ld %ld", &kind, &code, &restartable, &step, &ran_ms) !=
      5)
    return std::nullopt;
  if (kind < 0 || kind > static_cast<int>(Outcome::Kind::resized)) return std::nullopt;
  return Outcome{static_cast<Outcome::Kind>(kind),  code, restartable != 0,
                 std::string(text.substr(end + 1)), step, ran_ms};
}

}  // namespace lockstep::launch
