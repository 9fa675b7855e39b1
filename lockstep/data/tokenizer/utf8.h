// SPDX-License-Identifier: Apache-2.0
// Characters of a text that should be UTF-8, but need not be. Private: not installed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep::data {

struct Utf8Char {
  uint32_t code_point;
  size_t size;
};

// The character that begins at `at`; nothing where the byte there is not part of valid UTF-8. UTF-8
// is as Unicode has it: no longer form of a shorter one, no surrogates, nothing above 0x10ffff.
inline std::optional<Utf8Char> utf8_at(std::string_view text, size_t at) {
  const auto lead = static_cast<unsigned char>(text[at]);
  if (lead < 0x80) return Utf8Char{lead, 1};
  const size_t size = lead < 0xc2 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : lead < 0xf5 ? 4 : 1;
  if (size == 1 || text.size() - at < size) return std::nullopt;
  uint32_t code_point = lead & (0x7fu >> size);
  for (size_t i = 1; i < size; ++i) {
    const auto byte = static_cast<unsigned char>(text[at + i]);
    if ((byte & 0xc0) != 0x80) return std::nullopt;
    code_point = code_point << 6 | (byte & 0x3f);
  }
  const bool is_surrogate = code_point >= 0xd800 && code_point < 0xe000;
  if (size == 3 && (code_point < 0x800 || is_surrogate)) return std::nullopt;
  if (size == 4 && (code_point < 0x10000 || code_point > 0x10ffff)) return std::nullopt;
  return Utf8Char{code_point, size};
}

inline void append_utf8(std::string& text, uint32_t code_point) {
  const auto put = [&](uint32_t byte) { text += static_cast<char>(byte); };
  const auto tail = [&](int shift) { put(0x80 | (code_point >> shift & 0x3f)); };
  if (code_point < 0x80) return put(code_point);
  if (code_point < 0x800) {
    put(0xc0 | code_point >> 6);
  } else {
    if (code_point < 0x10000) {
      put(0xe0 | code_point >> 12);
    } else {
      put(0xf0 | code_point >> 18);
      tail(12);
    }
    tail(6);
  }
  tail(0);
}

}  // namespace lockstep::data
