// SPDX-License-Identifier: Apache-2.0
// Numbers of bytes for messages.
#pragma once

#include <cstdint>
#include <string>

namespace lockstep {

// "512 B", "1.5 kB", "2 GB", "31.8 GB": powers of 1024, three digits, no zeros at the end.
std::string size_text(int64_t bytes);

}  // namespace lockstep
