// SPDX-License-Identifier: Apache-2.0
#include "lockstep/core/size_text.h"

#include <array>
#include <cmath>

#include "lockstep/core/format.h"

namespace lockstep {

std::string size_text(int64_t bytes) {
  constexpr std::array<const char*, 6> kUnits{"B", "kB", "MB", "GB", "TB", "PB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  // 999.7 would be written as 1000.
  while (std::abs(value) >= 999.5 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  const int digits = unit == 0 || std::abs(value) >= 99.95 ? 0 : std::abs(value) >= 9.995 ? 1 : 2;
  std::string text = format("{:.{}f}", value, digits);
  if (digits > 0) {
    text.erase(text.find_last_not_of('0') + 1);
    if (text.ends_with('.')) text.pop_back();
  }
  return format("{} {}", text, kUnits[unit]);
}

}  // namespace lockstep
