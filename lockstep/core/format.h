// SPDX-License-Identifier: Apache-2.0
// format("{} of {}", a, b): std::format where the library has it (GCC 13), fmt where it does not.
// Sources only; installed headers do not include this.
#pragma once

#include <version>

#ifdef __cpp_lib_format
#include <format>
namespace lockstep {
using std::format;
}
#else
#include <fmt/format.h>
namespace lockstep {
using fmt::format;
}
#endif

#include <cstdint>
#include <string>

namespace lockstep {

// "3, 1, 4": how lists appear in messages.
template <class Range>
std::string join(const Range& values, const char* separator = ", ") {
  std::string text;
  for (const auto& value : values) {
    if (!text.empty()) text += separator;
    text += format("{}", value);
  }
  return text;
}

// "1 file", "2 files".
inline std::string counted(int64_t count, const char* what) {
  return format("{} {}{}", count, what, count == 1 ? "" : "s");
}

}  // namespace lockstep
