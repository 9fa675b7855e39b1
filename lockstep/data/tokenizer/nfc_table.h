// SPDX-License-Identifier: Apache-2.0
// Canonical decompositions and combining classes of Unicode 9.0, as the tokenizers library has
// them. Private: not installed.
#pragma once

#include <cstdint>
#include <span>

namespace lockstep::data {

// All in increasing order. Hangul syllables are not in it: they follow a rule.
struct NfcTable {
  // A character that becomes one other: character << 21 | other.
  std::span<const uint64_t> singles;
  // A character that becomes two: composes << 63 | character << 42 | first << 21 | second.
  // `composes` says that the two become the character again. In order apart from that bit.
  std::span<const uint64_t> pairs;
  // Where the combining class changes: character << 8 | class.
  std::span<const uint32_t> classes;
};

const NfcTable& nfc_table();

}  // namespace lockstep::data
