// SPDX-License-Identifier: Apache-2.0
// What the patterns of tokenizers ask about a character.
#pragma once

#include <cstdint>

namespace lockstep::data {

enum class CharClass : uint8_t {
  other,
  letter,  // \p{L}
  number,  // \p{N}
  space,   // White_Space, which is \s
};

// `code_point` is below 0x110000. Unicode 16.0, as tokenizers 0.22 and 0.23; characters that a
// later version added are `other`.
CharClass char_class(uint32_t code_point);

}  // namespace lockstep::data
