// SPDX-License-Identifier: Apache-2.0
// Damaged files, for tests of what reads them.
#pragma once

#include <algorithm>
#include <random>
#include <span>
#include <string>

namespace lockstep::formats::test_support {

// The bytes after one to three changes: a bit, some bytes less, more, others, others again from
// elsewhere, a digit, an end. `pieces` are texts that mean something to the reader.
inline std::string mutate(std::string bytes, std::mt19937& random,
                          std::span<const char* const> pieces) {
  const auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
  for (size_t rounds = 1 + below(3); rounds > 0; --rounds) {
    const auto at = below(bytes.size() + 1);
    const auto count = std::min(below(12), bytes.size() - at);
    switch (below(9)) {
      case 0:
        if (at < bytes.size()) bytes[at] = static_cast<char>(bytes[at] ^ (1 << below(8)));
        break;
      case 1:
        bytes.erase(at, count);
        break;
      case 2:
        bytes.insert(at, pieces[below(pieces.size())]);
        break;
      case 3:
        bytes.replace(at, count, pieces[below(pieces.size())]);
        break;
      case 4:
        bytes.resize(at);
        break;
      case 5:
        bytes.insert(at, " ");
        break;
      case 6:
        if (const auto digit = bytes.find_first_of("0123456789", at); digit != std::string::npos) {
          bytes[digit] = static_cast<char>('0' + below(10));
        }
        break;
      case 7:
        for (size_t i = at; i < at + count; ++i) bytes[i] = static_cast<char>(random());
        break;
      default:
        bytes.insert(below(bytes.size() + 1), bytes.substr(at, count * 4));
    }
  }
  return bytes;
}

}  // namespace lockstep::formats::test_support
