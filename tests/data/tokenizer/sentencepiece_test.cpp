// SPDX-License-Identifier: Apache-2.0
// Tokenizers as Llama 2, Mistral and Qwen have them: SentencePiece's BPE, and normalizers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "lockstep/core/error.h"
#include "tests/data/tokenizer/tokenizer_file.h"
#include "tests/support/says.h"

namespace lockstep::data {
namespace {

using test::says;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::ThrowsMessage;

const std::string kMeta = "\xe2\x96\x81";

// <unk>, <s> and </s>, the bytes from 3 on, then characters and the merges' tokens.
Json llama2_like(const std::vector<std::pair<std::string, std::string>>& merges) {
  Json json = gpt2_like({});
  Json vocab{{"<unk>", 0}, {"<s>", 1}, {"</s>", 2}}, pairs = Json::array();
  for (int byte = 0; byte < 256; ++byte) {
    const char* const digits = "0123456789ABCDEF";
    vocab[std::string("<0x") + digits[byte / 16] + digits[byte % 16] + ">"] = 3 + byte;
  }
  int next = 259;
  for (const std::string& token :
       {kMeta, std::string("a"), std::string("b"), std::string("\xc3\xa9")})
    vocab[token] = next++;
  for (const auto& [left, right] : merges) {
    pairs.push_back({left, right});
    if (!vocab.contains(left + right)) vocab[left + right] = next++;
  }
  json["added_tokens"] = {added(1, "<s>"), added(2, "</s>")};
  json["pre_tokenizer"] = nullptr;
  json["normalizer"] = {
      {"type", "Sequence"},
      {"normalizers",
       {{{"type", "Prepend"}, {"prepend", kMeta}},
        {{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", kMeta}}}}};
  json["model"]["byte_fallback"] = true;
  json["model"]["vocab"] = vocab;
  json["model"]["merges"] = pairs;
  return json;
}

void use_metaspace(Json& json, const char* scheme, bool split) {
  json["normalizer"] = nullptr;
  json["pre_tokenizer"] = {
      {"type", "Metaspace"}, {"replacement", kMeta}, {"prepend_scheme", scheme}, {"split", split}};
}

TEST_F(TokenizerFile, SentencePieceWithANormalizer) {
  const auto tokenizer = load(llama2_like({{kMeta, "a"}, {kMeta, kMeta}, {"a", "b"}}));
  EXPECT_THAT(tokenizer.encode("ab"), ElementsAre(263, 261));
  EXPECT_THAT(tokenizer.encode(" ab"), ElementsAre(259, 263, 261));  // the space is one more
  EXPECT_THAT(tokenizer.encode("a  a"), ElementsAre(263, 259, 263));
  EXPECT_THAT(tokenizer.encode("\xc3\xa9z"), ElementsAre(259, 262, 3 + 'z'));
  EXPECT_THAT(tokenizer.encode("b\xe4\xb8\xad"),
              ElementsAre(259, 261, 3 + 0xe4, 3 + 0xb8, 3 + 0xad));
  EXPECT_THAT(tokenizer.encode("b\xff"), ElementsAre(259, 261, 3 + 0xff));
  EXPECT_THAT(tokenizer.encode("<s>a</s>b"), ElementsAre(1, 263, 2, 259, 261));
  EXPECT_THAT(tokenizer.encode(""), IsEmpty());
  EXPECT_THAT(tokenizer.encode("<s>"), ElementsAre(1));
  EXPECT_EQ(tokenizer.end_of_text(), 2);
  EXPECT_EQ(tokenizer.decode(tokenizer.encode("<s>a  \xe4\xb8\xad")), "<s> a  \xe4\xb8\xad");
}

// A normalized token is looked for in the normalized text, as it is when normalized itself.
TEST_F(TokenizerFile, NormalizedTokensOfSentencePiece) {
  auto json = llama2_like({{kMeta, "a"}});
  json["added_tokens"].push_back(added(264, "a b", /*normalized=*/true));
  const auto tokenizer = load(json);
  EXPECT_THAT(tokenizer.encode("a bb"), ElementsAre(264, 261));
  EXPECT_THAT(tokenizer.encode("ba b"),
              ElementsAre(259, 261, 260, 259, 261));  // no space before it
  EXPECT_THAT(tokenizer.encode("b a b"), ElementsAre(259, 261, 264));
  json["added_tokens"].push_back(added(265,
                                       "a\xe2\x96\x81"
                                       "b",
                                       /*normalized=*/true));
  EXPECT_THAT([&] { load(json); }, ThrowsMessage<ConfigError>(says("normalized")));
}

TEST_F(TokenizerFile, Metaspace) {
  auto json = llama2_like({{kMeta, "a"}, {"a", kMeta}, {kMeta, kMeta}});
  use_metaspace(json, "first", false);
  EXPECT_THAT(load(json).encode("a<s>a"), ElementsAre(263, 1, 260));
  EXPECT_THAT(load(json).encode(" a"), ElementsAre(263));
  EXPECT_THAT(load(json).encode("ba b"), ElementsAre(259, 261, 264, 261));  // "a" and the space
  use_metaspace(json, "always", true);
  EXPECT_THAT(load(json).encode("a<s>a"), ElementsAre(263, 1, 263));
  EXPECT_THAT(load(json).encode("ba b"), ElementsAre(259, 261, 260, 259, 261));
  EXPECT_THAT(load(json).encode("   b"), ElementsAre(259, 259, 259, 261));  // one word each
  use_metaspace(json, "never", false);
  EXPECT_THAT(load(json).encode("a   b"), ElementsAre(264, 265, 261));
}

// One word or many: the tokens are the same, because no merge joins two words.
TEST_F(TokenizerFile, SentencePieceOfLongTexts) {
  const auto json =
      llama2_like({{kMeta, "a"}, {kMeta, kMeta}, {"a", "b"}, {kMeta + kMeta, kMeta + "a"}});
  const auto tokenizer = load(json);
  std::string text;
  for (int i = 0; i < 3000; ++i) text += std::string(i % 5, ' ') + (i % 3 == 0 ? "ab" : "ba");
  auto joined = json;  // a merge that would join words, of a character that the text does not have
  joined["model"]["vocab"]["\xc3\xa9" + kMeta] = 267;
  joined["model"]["merges"].push_back({"\xc3\xa9", kMeta});
  EXPECT_EQ(tokenizer.encode(text), load(joined).encode(text));
  EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), " " + text);
}

TEST_F(TokenizerFile, RefusesOtherSentencePieces) {
  const auto no = [&](const std::function<void(Json&)>& change, const std::string& message) {
    auto json = llama2_like({{kMeta, "a"}});
    use_metaspace(json, "first", false);
    change(json);
    EXPECT_THAT([&] { load(json); }, ThrowsMessage<ConfigError>(HasSubstr(message))) << message;
  };
  no([](Json& j) { j["model"]["byte_fallback"] = false; }, "with model.byte_fallback true also");
  no([](Json& j) { j["model"]["vocab"].erase("<0x0A>"); }, R"(no token "<0x0A>" for byte 10)");
  no([](Json& j) { j["pre_tokenizer"]["replacement"] = "_"; }, R"(replacement is "_")");
  no([](Json& j) { j["pre_tokenizer"]["prepend_scheme"] = "last"; }, "always, first, never");
  no([](Json& j) { j["pre_tokenizer"]["add_prefix_space"] = false; },
     "add_prefix_space is false; supported: true unless prepend_scheme is never");
}

// Qwen's: what is written with a mark of its own and what is one character are the same.
TEST_F(TokenizerFile, CanonicalComposition) {
  auto json = gpt2_like({{symbol(0xc3), symbol(0xa9)}});
  json["normalizer"] = {{"type", "NFC"}};
  const auto tokenizer = load(json);
  EXPECT_THAT(tokenizer.encode("e\xcc\x81"), ElementsAre(256));
  EXPECT_THAT(tokenizer.encode("\xc3\xa9"), ElementsAre(256));
  const auto nfc = [&](const std::string& text) {
    return tokenizer.decode(tokenizer.encode(text));
  };
  EXPECT_EQ(nfc("\xe1\x84\x92\xe1\x85\xa1\xe1\x86\xab"), "\xed\x95\x9c");  // Hangul
  EXPECT_EQ(nfc("q\xcc\x87\xcc\xa3"), "q\xcc\xa3\xcc\x87");                // marks in their order
  EXPECT_EQ(nfc("s\xcc\x87\xcc\xa3"), "\xe1\xb9\xa9");                     // both join
  EXPECT_EQ(nfc("\xe2\x84\xab"), "\xc3\x85");                              // the sign for angstrom
  EXPECT_EQ(nfc("\xe0\xa5\x98"), "\xe0\xa4\x95\xe0\xa4\xbc");              // stays apart
  EXPECT_EQ(nfc("e\xff\xcc\x81"), "e\xff\xcc\x81");                        // what is not UTF-8
  EXPECT_EQ(nfc("a\xcc\x8d\xcc\x81"), "a\xcc\x8d\xcc\x81");  // the first mark is between
  std::string text, expected;
  for (int i = 0; i < 5000; ++i) {  // in several pieces
    text += "ae\xcc\x81";
    expected += "a\xc3\xa9";
  }
  EXPECT_EQ(nfc(text), expected);
}

}  // namespace
}  // namespace lockstep::data
