// SPDX-License-Identifier: Apache-2.0
// Input that is refused with a message that says this.
#pragma once

#include <gmock/gmock.h>

#include <string>

#include "lockstep/core/error.h"
#include "tests/support/says.h"

namespace lockstep::test {

inline auto refused(const std::string& facts) {
  return testing::ThrowsMessage<ConfigError>(says(facts));
}

}  // namespace lockstep::test
