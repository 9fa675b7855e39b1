// SPDX-License-Identifier: Apache-2.0
// Input that is refused with exactly this message.
#pragma once

#include <gmock/gmock.h>

#include <string>

#include "lockstep/core/error.h"

namespace lockstep::test {

inline auto refused(const std::string& message) {
  return testing::ThrowsMessage<ConfigError>(testing::StrEq(message));
}

}  // namespace lockstep::test
