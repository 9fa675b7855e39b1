// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/tokenizer/pre_tokenizer.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/data/tokenizer/unicode_table.h"
#include "lockstep/data/tokenizer/utf8.h"

namespace lockstep::data {
namespace {

constexpr std::pair<std::string_view, WordPattern> kSpellings[] = {
    {R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)",
     WordPattern::gpt2},
    {R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
     WordPattern::llama3},
    {R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
     WordPattern::qwen2},
};

constexpr std::array<CharClass, 128> kAscii = [] {
  std::array<CharClass, 128> classes{};
  for (char c = 'a'; c <= 'z'; ++c) classes[c] = classes[c - 'a' + 'A'] = CharClass::letter;
  for (char c = '0'; c <= '9'; ++c) classes[c] = CharClass::number;
  for (const char c : {'\t', '\n', '\v', '\f', '\r', ' '}) classes[c] = CharClass::space;
  return classes;
}();

struct Char {
  CharClass kind;
  size_t size;
};

// Of several bytes, or one that is no character.
Char long_char_at(std::string_view text, size_t at) {
  const auto c = utf8_at(text, at);
  return c ? Char{char_class(c->code_point), c->size} : Char{CharClass::other, 1};
}

Char char_at(std::string_view text, size_t at) {
  const auto byte = static_cast<unsigned char>(text[at]);
  return byte < 128 ? Char{kAscii[byte], 1} : long_char_at(text, at);
}

// Where the characters of that class that begin at `at` end.
size_t run_end(std::string_view text, size_t at, CharClass kind) {
  while (at < text.size()) {
    const Char next = char_at(text, at);
    if (next.kind != kind) break;
    at += next.size;
  }
  return at;
}

bool is_line_end(char c) { return c == '\r' || c == '\n'; }

// 's 't 'm 'd 're 've 'll; 0 where the text begins with none of them.
size_t contraction(std::string_view text, bool ignore_case) {
  if (text.size() < 2 || text[0] != '\'') return 0;
  const auto letter = [&](size_t at) {
    const char c = at < text.size() ? text[at] : '\0';
    return ignore_case && c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  };
  const char first = letter(1), second = letter(2);
  if (first == 's' || first == 't' || first == 'm' || first == 'd') return 2;
  if ((first == 'r' || first == 'v') && second == 'e') return 3;
  if (first == 'l' && second == 'l') return 3;
  // The long s, U+017F, is another lower case of S.
  if (ignore_case && text.substr(1, 2) == "\xc5\xbf") return 3;
  return 0;
}

// \s+(?!\S)|\s+ : the last space before a word is left to the word.
size_t spaces(std::string_view text) {
  size_t last = 0, end = 0;
  while (end < text.size()) {
    const Char next = char_at(text, end);
    if (next.kind != CharClass::space) break;
    last = end;
    end += next.size;
  }
  return end == text.size() || last == 0 ? end : last;
}

// The index after an optional space that something follows.
size_t after_space(std::string_view text) { return text[0] == ' ' && text.size() > 1 ? 1 : 0; }

size_t gpt2_word(std::string_view text) {
  if (const size_t size = contraction(text, false)) return size;
  const size_t begin = after_space(text);
  const CharClass kind = char_at(text, begin).kind;
  return kind == CharClass::space ? spaces(text) : run_end(text, begin, kind);
}

size_t llama3_word(std::string_view text, int max_digits) {
  if (const size_t size = contraction(text, true)) return size;
  const Char first = char_at(text, 0);
  if (first.kind == CharClass::letter) return run_end(text, 0, CharClass::letter);
  if (first.kind == CharClass::number) {
    size_t end = first.size;
    for (int digits = 1; digits < max_digits && end < text.size(); ++digits) {
      const Char next = char_at(text, end);
      if (next.kind != CharClass::number) break;
      end += next.size;
    }
    return end;
  }
  // Letters take one symbol or space before them along, but not a line end.
  if (!is_line_end(text[0]) && first.size < text.size() &&
      char_at(text, first.size).kind == CharClass::letter) {
    return run_end(text, first.size, CharClass::letter);
  }
  const size_t begin = after_space(text);
  if (char_at(text, begin).kind == CharClass::other) {
    size_t end = run_end(text, begin, CharClass::other);
    while (end < text.size() && is_line_end(text[end])) ++end;
    return end;
  }
  // \s*[\r\n]+ : up to the last line end among the spaces.
  const size_t end = run_end(text, 0, CharClass::space);
  const size_t line_end = text.substr(0, end).find_last_of("\r\n");
  return line_end == std::string_view::npos ? spaces(text) : line_end + 1;
}

size_t meta_word(std::string_view text, bool keeps_runs) {
  size_t begin = 0;
  if (text.starts_with(kMetaSpace)) begin = kMetaSpace.size();
  while (keeps_runs && text.substr(begin).starts_with(kMetaSpace)) begin += kMetaSpace.size();
  return std::min(text.find(kMetaSpace, begin), text.size());
}

}  // namespace

std::optional<WordPattern> word_pattern(std::string_view regex) {
  for (const auto& [spelling, pattern] : kSpellings) {
    if (spelling == regex) return pattern;
  }
  return std::nullopt;
}

std::string known_word_patterns() {
  std::string text;
  for (const auto& [spelling, pattern] : kSpellings) {
    text += format("{}`{}`", text.empty() ? "" : ", ", spelling);
  }
  return text;
}

size_t first_word(std::string_view text, WordPattern pattern) {
  switch (pattern) {
    case WordPattern::whole:
      return text.size();
    case WordPattern::gpt2:
      return gpt2_word(text);
    case WordPattern::llama3:
      return llama3_word(text, 3);
    case WordPattern::qwen2:
      return llama3_word(text, 1);
    case WordPattern::meta_words:
      return meta_word(text, /*keeps_runs=*/false);
    case WordPattern::meta_runs:
      return meta_word(text, /*keeps_runs=*/true);
  }
  check(false, "every word pattern has a scanner");
  return 0;
}

}  // namespace lockstep::data
