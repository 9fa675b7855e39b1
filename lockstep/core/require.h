// SPDX-License-Identifier: Apache-2.0
// Rules about what a caller passes in. Sources only; installed headers do not include this.
#pragma once

#include <string>
#include <string_view>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep {

inline void require(bool holds, const std::string& message) {
  if (!holds) throw ConfigError(message);
}

// Rules of one class, whose messages begin with its name: "[AdamW] lr is -1, must be at least 0".
class Requirement {
 public:
  explicit constexpr Requirement(const char* subject) : subject_(subject) {}

  void operator()(bool holds, const std::string& message) const {
    if (!holds) throw ConfigError(format("[{}] {}", subject_, message));
  }
  template <class T>
  void operator()(bool holds, const char* what, T value, std::string_view rule) const {
    if (!holds) throw ConfigError(format("[{}] {} is {}, must be {}", subject_, what, value, rule));
  }

 private:
  const char* subject_;
};

}  // namespace lockstep
