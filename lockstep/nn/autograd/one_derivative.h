// SPDX-License-Identifier: Apache-2.0
// For backward functions that are not recorded themselves. Private: not installed.
#pragma once

#include <c10/core/GradMode.h>

#include <string>

#include "lockstep/core/error.h"

namespace lockstep::nn {

// Throws where a second derivative is asked for, which would silently be none.
inline void require_one_derivative(const char* operation) {
  if (c10::GradMode::is_enabled()) {
    throw Error(std::string("[") + operation + "] can be differentiated once only");
  }
}

}  // namespace lockstep::nn
