// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/tokenizer/pre_tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/data/tokenizer/unicode_table.h"

namespace lockstep::data {
namespace {

using testing::ElementsAre;

std::vector<std::string> words(std::string_view text, WordPattern pattern) {
  std::vector<std::string> found;
  while (!text.empty()) {
    const size_t size = first_word(text, pattern);
    EXPECT_GT(size, 0u);
    if (size == 0) break;
    found.emplace_back(text.substr(0, size));
    text.remove_prefix(size);
  }
  return found;
}

auto gpt2(std::string_view text) { return words(text, WordPattern::gpt2); }
auto llama3(std::string_view text) { return words(text, WordPattern::llama3); }
auto qwen2(std::string_view text) { return words(text, WordPattern::qwen2); }

TEST(CharClass, EdgesOfRanges) {
  for (const uint32_t letter : {0x41u, 0x5au, 0x61u, 0x7au, 0xaau, 0xb5u, 0x17fu, 0x2b0u, 0x4e00u,
                                0xac00u, 0x1c89u /* 16.0 */, 0x20000u}) {
    EXPECT_EQ(char_class(letter), CharClass::letter) << letter;
  }
  for (const uint32_t number : {0x30u, 0x39u, 0xb2u, 0xbcu, 0x660u, 0x2167u, 0x3007u, 0x1d7ffu}) {
    EXPECT_EQ(char_class(number), CharClass::number) << number;
  }
  for (const uint32_t space : {0x9u, 0xdu, 0x20u, 0x85u, 0xa0u, 0x1680u, 0x2000u, 0x200au, 0x2028u,
                               0x2029u, 0x202fu, 0x205fu, 0x3000u}) {
    EXPECT_EQ(char_class(space), CharClass::space) << space;
  }
  for (const uint32_t other : {0x0u, 0x8u, 0xeu, 0x1cu, 0x1fu, 0x21u, 0x2fu, 0x3au, 0x40u, 0x5bu,
                               0x7bu, 0x301u, 0x180eu, 0x200bu, 0xfeffu, 0x1f600u, 0x10ffffu}) {
    EXPECT_EQ(char_class(other), CharClass::other) << other;
  }
}

TEST(PreTokenizer, Gpt2) {
  EXPECT_THAT(gpt2("Hello world, 123 times!"),
              ElementsAre("Hello", " world", ",", " 123", " times", "!"));
  EXPECT_THAT(gpt2("a1b22 c"), ElementsAre("a", "1", "b", "22", " c"));
  // Spaces leave the last one to the word, other white space does not join it.
  EXPECT_THAT(gpt2("a   b"), ElementsAre("a", "  ", " b"));
  EXPECT_THAT(gpt2("a\n\nb"), ElementsAre("a", "\n", "\n", "b"));
  EXPECT_THAT(gpt2("a \n b"), ElementsAre("a", " \n", " b"));
  EXPECT_THAT(gpt2("a\tb"), ElementsAre("a", "\t", "b"));
  EXPECT_THAT(gpt2("a  "), ElementsAre("a", "  "));
  EXPECT_THAT(gpt2(" "), ElementsAre(" "));
  EXPECT_THAT(gpt2("x\r\n y"), ElementsAre("x", "\r\n", " y"));
  EXPECT_THAT(gpt2("if (x) {\n    y"), ElementsAre("if", " (", "x", ")", " {", "\n   ", " y"));
}

TEST(PreTokenizer, Gpt2Contractions) {
  EXPECT_THAT(gpt2("I'll we've they're it's don't I'm he'd"),
              ElementsAre("I", "'ll", " we", "'ve", " they", "'re", " it", "'s", " don", "'t", " I",
                          "'m", " he", "'d"));
  // In lower case only, and only where a word begins.
  EXPECT_THAT(gpt2("I'LL"), ElementsAre("I", "'", "LL"));
  EXPECT_THAT(gpt2("'stop 's"), ElementsAre("'s", "top", " '", "s"));
  EXPECT_THAT(gpt2("'l 'r ''s"), ElementsAre("'", "l", " '", "r", " ''", "s"));
}

TEST(PreTokenizer, Llama3) {
  EXPECT_THAT(llama3("Hello world, 12345 times!"),
              ElementsAre("Hello", " world", ",", " ", "123", "45", " times", "!"));
  // Letters take the symbol before them along.
  EXPECT_THAT(llama3("a_b(c\td"), ElementsAre("a", "_b", "(c", "\td"));
  EXPECT_THAT(llama3("--a"), ElementsAre("--", "a"));
  EXPECT_THAT(llama3("a\nb\rc"), ElementsAre("a", "\n", "b", "\r", "c"));
  // Line ends stay with the symbols before them, and with the spaces.
  EXPECT_THAT(llama3("x;\r\n\r\n  y"), ElementsAre("x", ";\r\n\r\n", " ", " y"));
  EXPECT_THAT(llama3("x \n \n  y"), ElementsAre("x", " \n \n", " ", " y"));
  EXPECT_THAT(llama3("x  \n"), ElementsAre("x", "  \n"));
  EXPECT_THAT(llama3("x   "), ElementsAre("x", "   "));
  EXPECT_THAT(llama3(" {\n"), ElementsAre(" {\n"));
  EXPECT_THAT(llama3("  ("), ElementsAre(" ", " ("));
  EXPECT_THAT(llama3("  1"), ElementsAre(" ", " ", "1"));
}

TEST(PreTokenizer, Llama3Contractions) {
  EXPECT_THAT(llama3("I'LL we'Ve it'S"), ElementsAre("I", "'LL", " we", "'Ve", " it", "'S"));
  EXPECT_THAT(llama3("'\xc5\xbf"
                     "a"),
              ElementsAre("'\xc5\xbf", "a"));  // the long s
  EXPECT_THAT(llama3("'xa"), ElementsAre("'xa"));
}

TEST(PreTokenizer, Qwen2HasSingleDigits) {
  EXPECT_THAT(qwen2("a 123'S"), ElementsAre("a", " ", "1", "2", "3", "'S"));
}

TEST(PreTokenizer, OtherScripts) {
  // Cyrillic; a no-break space; Devanagari, whose vowel signs are no letters; Arabic digits.
  EXPECT_THAT(gpt2("\xd0\x96\xd0\xb4 \xd1\x8f"), ElementsAre("\xd0\x96\xd0\xb4", " \xd1\x8f"));
  EXPECT_THAT(gpt2("a\xc2\xa0 b"), ElementsAre("a", "\xc2\xa0", " b"));
  EXPECT_THAT(gpt2("\xe0\xa4\x95\xe0\xa4\xbf"), ElementsAre("\xe0\xa4\x95", "\xe0\xa4\xbf"));
  EXPECT_THAT(llama3("\xd9\xa0\xd9\xa1\xd9\xa2\xd9\xa3"),
              ElementsAre("\xd9\xa0\xd9\xa1\xd9\xa2", "\xd9\xa3"));
  EXPECT_THAT(llama3("\xe3\x80\x80\xe4\xb8\xad"), ElementsAre("\xe3\x80\x80\xe4\xb8\xad"));
}

TEST(PreTokenizer, InvalidUtf8IsSymbols) {
  // A stray continuation, a cut off sequence, an overlong slash, a surrogate, above 0x10ffff.
  for (const std::string bad : {"\x80", "\xe4\xb8", "\xc0\xaf", "\xe0\x80\xaf", "\xed\xa0\x80",
                                "\xf4\x90\x80\x80", "\xff", "\xf0\x80\x80\x80"}) {
    EXPECT_THAT(gpt2("a" + bad), ElementsAre("a", bad));
    EXPECT_THAT(gpt2("a " + bad + "b"), ElementsAre("a", " " + bad, "b"));
    EXPECT_THAT(llama3("a " + bad + "\n"), ElementsAre("a", " " + bad + "\n"));
  }
  // A letter takes one symbol along, which is one byte of these.
  EXPECT_THAT(llama3("\xffz"), ElementsAre("\xffz"));
  for (const std::string bad : {"\xe4\xb8", "\xc0\xaf", "\xe0\x80\xaf", "\xed\xa0\x80",
                                "\xf4\x90\x80\x80", "\xf0\x80\x80\x80"}) {
    EXPECT_THAT(llama3(bad + "z"), ElementsAre(bad, "z"));
  }
}

TEST(PreTokenizer, Whole) { EXPECT_THAT(words("a b\n", WordPattern::whole), ElementsAre("a b\n")); }

TEST(PreTokenizer, Spellings) {
  const std::string known = known_word_patterns();
  EXPECT_EQ(std::count(known.begin(), known.end(), '`'), 6);
  EXPECT_EQ(
      word_pattern(R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)"),
      WordPattern::gpt2);
  EXPECT_EQ(word_pattern(R"(\s+)"), std::nullopt);
}

}  // namespace
}  // namespace lockstep::data
