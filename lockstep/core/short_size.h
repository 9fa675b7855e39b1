// Bytes for people.
#pragma once

#include <cstdint>
#include <string>

namespace lockstep {

// "512 B", "1.50 kB", "12.3 MB": powers of 1024, three digits.
std::string short_size(int64_t bytes);

}  // namespace lockstep
