// SPDX-License-Identifier: Apache-2.0
// The target of a token that counts in no loss.
#pragma once

#include <cstdint>

namespace lockstep::data {

// Targets of padding have it. Cross entropy, ours and libtorch's by default, leaves them out.
inline constexpr int64_t kIgnoredTarget = -100;

}  // namespace lockstep::data
