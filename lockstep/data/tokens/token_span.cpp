// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/tokens/token_span.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::data {
namespace {

static_assert(std::endian::native == std::endian::little, "files are read as they lie in memory");

// Calls `use` with a value of the C++ type.
template <class Use>
auto with_type(TokenType type, Use use) {
  switch (type) {
    case TokenType::uint8:
      return use(uint8_t{});
    case TokenType::int16:
      return use(int16_t{});
    case TokenType::int32:
      return use(int32_t{});
    case TokenType::int64:
      return use(int64_t{});
    case TokenType::uint16:
      return use(uint16_t{});
    case TokenType::uint32:
      return use(uint32_t{});
  }
  throw std::logic_error("lockstep bug: an unknown type of tokens");
}

// Files have headers of odd sizes, so no address is known to be aligned.
template <class T>
T load(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

}  // namespace

int64_t width_of(TokenType type) {
  return with_type(type, [](auto zero) { return static_cast<int64_t>(sizeof(zero)); });
}

void TokenSpan::read(int64_t begin, std::span<int64_t> out) const {
  const auto count = static_cast<int64_t>(out.size());
  if (begin < 0 || count > size_ || begin > size_ - count) {
    throw ConfigError(
        format("tokens [{}, {} + {}) must lie in [0, {})", begin, begin, count, size_));
  }
  with_type(type_, [&](auto zero) {
    using T = decltype(zero);
    const std::byte* at = bytes_.data() + static_cast<size_t>(begin) * sizeof(T);
    for (int64_t& token : out) {
      token = static_cast<int64_t>(load<T>(at));
      at += sizeof(T);
    }
  });
}

int64_t TokenSpan::max(int64_t begin, int64_t end) const {
  if (begin < 0 || begin > end || end > size_) {
    throw ConfigError(format("tokens [{}, {}) must lie in [0, {})", begin, end, size_));
  }
  if (begin == end) return -1;
  return with_type(type_, [&](auto zero) {
    using T = decltype(zero);
    T largest = std::numeric_limits<T>::min();
    for (int64_t i = begin; i < end; ++i) {
      largest = std::max(largest, load<T>(bytes_.data() + static_cast<size_t>(i) * sizeof(T)));
    }
    return static_cast<int64_t>(largest);
  });
}

}  // namespace lockstep::data
