// SPDX-License-Identifier: Apache-2.0
// Cuts text into the words that a byte-pair encoder works on, one at a time.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep::data {

// The patterns that scanners are written for.
enum class WordPattern {
  whole,   // the text is one word
  gpt2,    // contractions, letters, numbers, symbols and spaces
  llama3,  // contractions in any case, at most 3 digits, line ends apart
  qwen2,   // llama3 with single digits
  // SentencePiece's, where U+2581 stands for a space:
  meta_words,  // cut before each U+2581
  meta_runs,   // cut before each U+2581 that does not follow another
};

// U+2581, which SentencePiece writes for a space.
inline constexpr std::string_view kMetaSpace = "\xe2\x96\x81";

// The pattern that is spelled so in a tokenizer.json, where there is one.
std::optional<WordPattern> word_pattern(std::string_view regex);
// The spellings that word_pattern() knows, for messages.
std::string known_word_patterns();

// Bytes of the first word of `text`, which is not empty. The end of `text` counts as the end of
// everything. A byte that is not part of valid UTF-8 is a symbol by itself.
size_t first_word(std::string_view text, WordPattern pattern);

}  // namespace lockstep::data
