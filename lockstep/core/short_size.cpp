#include "lockstep/core/short_size.h"

#include <array>
#include <cstddef>

#include "lockstep/core/format.h"

namespace lockstep {

std::string short_size(int64_t bytes) {
  constexpr std::array<const char*, 5> kUnits{"B", "kB", "MB", "GB", "TB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1000 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  const int digits = unit == 0 || value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return format("{:.{}f} {}", value, digits, kUnits[unit]);
}

}  // namespace lockstep
