// SPDX-License-Identifier: Apache-2.0
// What a tokenizer.json does to a text before it looks for words. Private: not installed.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lockstep::data {

// One step of a normalizer.
struct NormalizerStep {
  enum class Kind {
    nfc,      // canonical composition, of Unicode 9.0
    prepend,  // `content` before a text that is not empty
    replace,  // every `pattern` by `content`
  };
  Kind kind = Kind::nfc;
  std::string pattern = {}, content = {};
};

// Bytes that are not UTF-8 stay as they are.
std::string to_nfc(std::string_view text);

std::string normalize(std::string_view text, const std::vector<NormalizerStep>& steps);

}  // namespace lockstep::data
