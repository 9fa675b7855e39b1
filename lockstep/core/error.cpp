// SPDX-License-Identifier: Apache-2.0
#include "lockstep/core/error.h"

#include <string>
#include <system_error>

namespace lockstep {

SystemError::SystemError(const std::string& what, int error_number)
    : Error(what + ": " + std::generic_category().message(error_number)),
      error_number_(error_number) {}

OutOfMemory::OutOfMemory(int64_t asked, int64_t held, int64_t limit)
    : Error("out of memory: " + std::to_string(asked) + " bytes asked for, " +
            std::to_string(held) + " held, the limit is " + std::to_string(limit)),
      asked_(asked),
      held_(held),
      limit_(limit) {}

}  // namespace lockstep
