// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/tokenizer/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/core/error.h"
#include "tests/data/tokenizer/tokenizer_file.h"
#include "tests/support/says.h"

namespace lockstep::data {
namespace {

using test::says;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::ThrowsMessage;

const std::string kSpace = symbol(' ');
const std::string kLlama3 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

void use_llama3_pattern(Json& json) {
  json["pre_tokenizer"] = {{"type", "Sequence"},
                           {"pretokenizers",
                            {{{"type", "Split"},
                              {"pattern", {{"Regex", kLlama3}}},
                              {"behavior", "Isolated"},
                              {"invert", false}},
                             {{"type", "ByteLevel"},
                              {"add_prefix_space", false},
                              {"trim_offsets", true},
                              {"use_regex", false}}}}};
}

TEST(ByteTokenizer, IsBytes) {
  const auto tokenizer = Tokenizer::open("bytes");
  EXPECT_EQ(tokenizer.name(), "bytes");
  EXPECT_EQ(tokenizer.vocab_size(), 256);
  EXPECT_EQ(tokenizer.end_of_text(), std::nullopt);
  const std::string text("a\0\xff", 3);
  const auto tokens = tokenizer.encode(text);
  EXPECT_THAT(tokens, ElementsAre(97, 0, 255));
  EXPECT_EQ(tokenizer.decode(tokens), text);
  EXPECT_THAT([&] { tokenizer.decode(std::vector<int32_t>{256}); },
              ThrowsMessage<ConfigError>(says("id 256")));
}

TEST_F(TokenizerFile, MergesByRankThenLeftmost) {
  const auto tokenizer = load(gpt2_like({{"b", "c"}, {"a", "b"}, {"a", "a"}, {"aa", "a"}}));
  EXPECT_THAT(tokenizer.encode("abc"), ElementsAre('a', 256));  // not ab c
  EXPECT_THAT(tokenizer.encode("abab"), ElementsAre(257, 257));
  EXPECT_THAT(tokenizer.encode("aaaaa"), ElementsAre(258, 259));
  EXPECT_THAT(tokenizer.encode("aaab"), ElementsAre(258, 257));
  EXPECT_THAT(tokenizer.encode(""), IsEmpty());
  EXPECT_EQ(tokenizer.vocab_size(), 261);
  EXPECT_EQ(tokenizer.name(), path());
}

// One merge at a time: after the first "ab", "ab" + "a" is lower than the second "a" + "b".
TEST_F(TokenizerFile, ANewPairMayComeFirst) {
  const auto tokenizer = load(gpt2_like({{"ab", "a"}, {"a", "b"}}));
  EXPECT_THAT(tokenizer.encode("abab"), ElementsAre(256, 'b'));
}

TEST_F(TokenizerFile, MergesStayInsideWords) {
  const auto tokenizer = load(gpt2_like({{kSpace, "b"}, {"a", kSpace + "b"}, {"b", "!"}}));
  EXPECT_THAT(tokenizer.encode("a b"), ElementsAre('a', 256));
  EXPECT_THAT(tokenizer.encode("b!"), ElementsAre('b', '!'));
  EXPECT_THAT(tokenizer.encode("a  b"), ElementsAre('a', ' ', 256));
}

TEST_F(TokenizerFile, MergesHaveTwoSpellings) {
  auto json = gpt2_like({{kSpace, "a"}, {kSpace + "a", "b"}});
  const auto expected = load(json).encode("ab ab");
  EXPECT_THAT(expected, ElementsAre('a', 'b', 257));
  json["model"]["merges"] = {kSpace + " a", kSpace + "a b"};
  EXPECT_EQ(load(json).encode("ab ab"), expected);
}

TEST_F(TokenizerFile, IgnoreMergesTakesWholeWords) {
  auto json = gpt2_like({{"a", "b"}});
  json["added_tokens"] = Json::array();
  json["model"]["vocab"][kSpace + "abc"] = 257;
  EXPECT_THAT(load(json).encode("x abc abcd"), ElementsAre('x', ' ', 256, 'c', ' ', 256, 'c', 'd'));
  json["model"]["ignore_merges"] = true;
  EXPECT_THAT(load(json).encode("x abc abcd"), ElementsAre('x', 257, ' ', 256, 'c', 'd'));
}

TEST_F(TokenizerFile, AddedTokensAreFoundFirst) {
  auto json = gpt2_like({{"a", "b"}, {"<", "|"}});
  EXPECT_THAT(load(json).encode("ab<|endoftext|>b<|end"),
              ElementsAre(256, 258, 'b', 257, 'e', 'n', 'd'));
  EXPECT_EQ(load(json).end_of_text(), 258);
  // The longest of those that begin leftmost; `normalized` ones in what is left.
  json["added_tokens"] = {added(258, "<|e"), added(259, "<|endo"), added(260, "b b", true),
                          added(261, "doff"), added(262, "<|end_of_text|>")};
  const auto tokenizer = load(json);
  EXPECT_THAT(tokenizer.encode("<|endoff"), ElementsAre(259, 'f', 'f'));
  EXPECT_THAT(tokenizer.encode("<|en<|endof"), ElementsAre(258, 'n', 259, 'f'));
  EXPECT_THAT(tokenizer.encode("b b b b<|e"), ElementsAre(260, ' ', 260, 258));
  EXPECT_THAT(tokenizer.encode("<<|<|e"), ElementsAre('<', 257, 258));
  EXPECT_EQ(tokenizer.end_of_text(), 262);
  EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{260, 256, 262}), "b bab<|end_of_text|>");
}

TEST_F(TokenizerFile, WhichAddedTokenWins) {
  auto json = gpt2_like({});
  json["added_tokens"] = {added(256, "<|e"), added(257, "<|ea"), added(258, "<|eab"),
                          added(259, "xy", true), added(260, "yz")};
  const auto tokenizer = load(json);
  EXPECT_THAT(tokenizer.encode("<|ez"), ElementsAre(256, 'z'));
  EXPECT_THAT(tokenizer.encode("<|eac<|eab<|e"), ElementsAre(257, 'c', 258, 256));
  // Not the leftmost: `normalized` ones have what the others leave.
  EXPECT_THAT(tokenizer.encode("xyz xy"), ElementsAre('x', 260, ' ', 259));
}

TEST_F(TokenizerFile, AddedTokensEndThePiece) {
  // Spaces before a special token stay together, as at the end of the text.
  const auto tokenizer = load(gpt2_like({{kSpace, kSpace}}));
  EXPECT_THAT(tokenizer.encode("  <|endoftext|>  x"), ElementsAre(256, 257, ' ', ' ', 'x'));
}

TEST_F(TokenizerFile, AnAddedTokenMayBeInTheVocabulary) {
  auto json = gpt2_like({{"a", "b"}});
  json["added_tokens"] = {added(256, "ab"), added(257, "</s>")};
  EXPECT_THAT(load(json).encode("xab</s>"), ElementsAre('x', 256, 257));
  EXPECT_EQ(load(json).end_of_text(), 257);
}

TEST_F(TokenizerFile, PrefixSpace) {
  auto json = gpt2_like({{kSpace, "a"}});
  json["pre_tokenizer"]["add_prefix_space"] = true;
  const auto tokenizer = load(json);
  EXPECT_THAT(tokenizer.encode("a a<|endoftext|>a"), ElementsAre(256, 256, 257, 256));
  EXPECT_THAT(tokenizer.encode(" a"), ElementsAre(256));
  EXPECT_THAT(tokenizer.encode("\na"), ElementsAre(' ', '\n', 'a'));
  EXPECT_THAT(tokenizer.encode(""), IsEmpty());
}

TEST_F(TokenizerFile, WithoutRegexTheTextIsOneWord) {
  auto json = gpt2_like({{"b", "!"}});
  json["pre_tokenizer"]["use_regex"] = false;
  EXPECT_THAT(load(json).encode("ab! "), ElementsAre('a', 256, ' '));
}

TEST_F(TokenizerFile, Llama3Pattern) {
  auto json = gpt2_like({{"1", "2"}, {"12", "3"}, {"3", "4"}, {"_", "a"}});
  use_llama3_pattern(json);
  EXPECT_THAT(load(json).encode("1234_a"), ElementsAre(257, '4', 259));
  json["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "Removed";
  json["pre_tokenizer"]["pretokenizers"][0]["invert"] = true;
  EXPECT_THAT(load(json).encode("1234_a"), ElementsAre(257, '4', 259));
}

TEST_F(TokenizerFile, AnyBytesComeBack) {
  auto json = gpt2_like({{symbol(0xe4), symbol(0xb8)}, {"a", "b"}, {symbol(0xff), symbol(0xff)}});
  for (const bool llama3 : {false, true}) {
    if (llama3) use_llama3_pattern(json);
    const auto tokenizer = load(json);
    std::string every;
    for (int first = 0; first < 256; ++first) {
      for (int second = 0; second < 256; second += 3) {
        const std::string text{'a', static_cast<char>(first), static_cast<char>(second), 'b'};
        ASSERT_EQ(tokenizer.decode(tokenizer.encode(text)), text) << first << " " << second;
        every += text;
      }
    }
    EXPECT_EQ(tokenizer.decode(tokenizer.encode(every)), every);
    EXPECT_THAT(tokenizer.encode("\xe4\xb8"), ElementsAre(256));
    EXPECT_THAT(tokenizer.encode("\xff\xff\xff"), ElementsAre(258, 255));
  }
}

// Longer than the cache takes, and with many merges.
TEST_F(TokenizerFile, LongWords) {
  const auto tokenizer = load(gpt2_like({{"a", "a"}, {"aa", "aa"}, {"aaaa", "aaaa"}}));
  const std::string text(100003, 'a');
  const auto tokens = tokenizer.encode(text);
  ASSERT_EQ(tokens.size(), 100003u / 8 + 2);
  EXPECT_EQ(tokens.front(), 258);
  EXPECT_THAT(std::vector(tokens.end() - 2, tokens.end()), ElementsAre(256, 'a'));
}

// The second time from the cache, where it takes words of that size.
TEST_F(TokenizerFile, TheCacheChangesNothing) {
  const auto tokenizer = load(gpt2_like({{"y", "z"}}));
  std::string word;
  for (int size = 1; size <= 40; ++size) {
    word += static_cast<char>('a' + size % 13);
    const std::string text = word + " " + word + "yz";
    const auto first = tokenizer.encode(text);
    EXPECT_EQ(first.size(), 2u * size + 2);
    EXPECT_EQ(tokenizer.encode(text), first);
    EXPECT_EQ(tokenizer.decode(first), text);
  }
}

TEST_F(TokenizerFile, ThreadsShareIt) {
  const auto tokenizer = load(gpt2_like({{"a", "b"}, {kSpace, "ab"}}));
  std::string text;
  for (int i = 0; i < 20000; ++i) text += " ab" + std::to_string(i * 7919);
  const auto expected = tokenizer.encode(text);
  std::vector<std::vector<int32_t>> found(4);
  {
    std::vector<std::jthread> threads;
    for (auto& tokens : found) {
      threads.emplace_back([&tokens, &text, copy = tokenizer] {
        for (size_t i = 0; i < text.size(); i += text.size() / 10) copy.encode(text.substr(i, 100));
        tokens = copy.encode(text);
      });
    }
  }
  for (const auto& tokens : found) EXPECT_EQ(tokens, expected);
}

TEST_F(TokenizerFile, Open) {
  EXPECT_THAT([&] { Tokenizer::open(folder_.string()); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr(path()), HasSubstr("\"bytes\""))));
  write(gpt2_like({}).dump());
  EXPECT_EQ(Tokenizer::open(folder_.string()).name(), path());
  EXPECT_EQ(Tokenizer::open(path()).vocab_size(), 257);
}

TEST_F(TokenizerFile, OtherFilesAreSaidToBeNoTokenizer) {
  write(R"({"model_type": "llama", "vocab_size": 512})");  // a config.json
  EXPECT_THAT([&] { Tokenizer::open(path()); },
              ThrowsMessage<ConfigError>(
                  AllOf(says("not a tokenizer.json"), Not(HasSubstr("pre_tokenizer")))));
  std::filesystem::remove(path());
  const auto once = [&](const std::string& message) {
    return message.find(path()) == message.rfind(path());
  };
  for (const std::string& name : {path(), folder_.string()}) {
    EXPECT_THAT([&] { Tokenizer::open(name); },
                ThrowsMessage<ConfigError>(AllOf(HasSubstr(path()), testing::Truly(once))));
  }
}

// Of a model whose file also has <|endoftext|>, as 256, and three other tokens after it.
TEST_F(TokenizerFile, EndOfTextIsTheOneThatTheModelNames) {
  auto json = gpt2_like({});
  for (const int id : {257, 258, 259})
    json["added_tokens"].push_back(added(id, "<" + std::to_string(id) + ">"));
  write(json.dump());
  const auto beside = [&](const std::string& name, const std::string& text) {
    std::ofstream(folder_ / name) << text;
  };
  const auto end = [&] { return Tokenizer::from_file(path()).end_of_text(); };
  EXPECT_EQ(end(), 256);
  beside("generation_config.json", R"({"eos_token_id": [259, 256]})");
  EXPECT_EQ(end(), 259);
  // A run's copy of config.json, and the file itself.
  beside("model_config.json", R"({"eos_token_id": 258})");
  EXPECT_EQ(end(), 258);
  beside("config.json", R"({"eos_token_id": [257, 258]})");
  EXPECT_EQ(end(), 257);
  // What names no token of this tokenizer does not count: defaults of a larger model, other files.
  for (const char* text : {R"({"eos_token_id": 50256})", R"({"eos_token_id": null})", "{}", "[",
                           R"({"eos_token_id": -1})", R"({"eos_token_id": []})"}) {
    beside("config.json", text);
    EXPECT_EQ(end(), 259) << text;
  }
  beside("config.json", R"({"eos_token_id": 257})");
  beside("tokenizer_config.json", R"({"eos_token": null})");
  EXPECT_EQ(end(), 257);
  beside("tokenizer_config.json", R"({"eos_token": "<259>"})");
  EXPECT_EQ(end(), 259);
  beside("tokenizer_config.json", R"({"eos_token": {"content": "<258>", "special": true}})");
  EXPECT_EQ(end(), 258);
  beside("tokenizer_config.json", R"({"eos_token": "<|im_end|>"})");
  EXPECT_THAT(end, ThrowsMessage<ConfigError>(
                       says((folder_ / "tokenizer_config.json").string() + " ... <|im_end|>")));
  beside("tokenizer_config.json", "{");
  EXPECT_THAT(end, ThrowsMessage<ConfigError>(HasSubstr("tokenizer_config.json")));
}

// The model may be in another folder than its tokenizer.
TEST_F(TokenizerFile, EndOfTextIsNamedInTheFolderOfTheModel) {
  auto json = gpt2_like({});
  json["added_tokens"].push_back(added(257, "<257>"));
  write(json.dump());
  const auto model = folder_ / "model";
  std::filesystem::create_directory(model);
  std::ofstream(model / "config.json") << R"({"eos_token_id": 257})";
  std::ofstream(folder_ / "config.json") << R"({"eos_token_id": 97})";
  EXPECT_EQ(Tokenizer::open(path(), model.string()).end_of_text(), 257);
  EXPECT_EQ(Tokenizer::open(path()).end_of_text(), 'a');
  std::ofstream(model / "tokenizer_config.json") << R"({"eos_token": "b"})";
  EXPECT_EQ(Tokenizer::open(path(), model.string()).end_of_text(), 'b');
  std::ofstream(folder_ / "tokenizer_config.json") << R"({"eos_token": "c"})";
  EXPECT_EQ(Tokenizer::open(path(), model.string()).end_of_text(), 'c');
  EXPECT_EQ(Tokenizer::open("bytes", model.string()).end_of_text(), std::nullopt);
}

TEST_F(TokenizerFile, DecodeRefusesIds) {
  auto json = gpt2_like({});
  json["added_tokens"] = Json::array();
  json["model"]["vocab"]["zz"] = 300;
  const auto tokenizer = load(json);
  EXPECT_EQ(tokenizer.vocab_size(), 301);
  for (const int32_t id : {-1, 256, 301}) {
    EXPECT_THAT([&] { tokenizer.decode(std::vector<int32_t>{id}); },
                ThrowsMessage<ConfigError>(says("id " + std::to_string(id) + " ... at least 0")));
  }
}

TEST_F(TokenizerFile, RefusesOtherKinds) {
  refused(
      [](Json& j) {
        j["normalizer"] = {{"type", "NFKC"}};
      },
      R"(normalizer is {"type":"NFKC"}; supported: null, NFC)");
  refused(
      [](Json& j) {
        j["normalizer"] = {{"type", "Replace"}, {"pattern", {{"Regex", " +"}}}, {"content", "x"}};
      },
      R"("pattern":{"Regex":" +"})");
  refused([](Json& j) { j["pre_tokenizer"] = nullptr; },
          "pre_tokenizer is null; supported: ByteLevel");
  refused([](Json& j) { j["pre_tokenizer"]["type"] = "Metaspace"; }, "Metaspace");
  refused([](Json& j) { j["pre_tokenizer"]["use_regex"] = 1; },
          "pre_tokenizer ByteLevel.use_regex is 1; supported: true, false");
  refused([](Json& j) { j["model"]["type"] = "Unigram"; },
          R"(model.type is "Unigram"; supported: "BPE")");
  refused([](Json& j) { j["model"]["dropout"] = 0.1; }, "model.dropout is 0.1");
  refused([](Json& j) { j["model"]["byte_fallback"] = true; }, "model.byte_fallback is true");
  refused([](Json& j) { j["model"]["end_of_word_suffix"] = "</w>"; },
          R"(model.end_of_word_suffix is "</w>")");
  refused([](Json& j) { j["model"]["continuing_subword_prefix"] = "##"; },
          R"(model.continuing_subword_prefix is "##")");
  for (const char* const key : {"single_word", "lstrip", "rstrip"}) {
    refused([&](Json& j) { j["added_tokens"][0][key] = true; },
            std::string(R"(added_tokens "<|endoftext|>".)") + key + " is true; supported: false");
  }
}

TEST_F(TokenizerFile, RefusesOtherPatterns) {
  const auto split = [&](const std::function<void(Json&)>& change, const std::string& message) {
    refused(
        [&](Json& j) {
          use_llama3_pattern(j);
          change(j["pre_tokenizer"]["pretokenizers"]);
        },
        message);
  };
  split([](Json& s) { s[0]["pattern"]["Regex"] = R"(\w+)"; },
        R"({"Regex":"\\w+"}; supported: Regex)");
  split([](Json& s) { s[0]["pattern"] = {{"String", " "}}; }, R"({"String":" "})");
  split([](Json& s) { s[0]["behavior"] = "MergedWithNext"; }, "MergedWithNext");
  split([](Json& s) { s[0]["invert"] = true; }, "Isolated with invert false");
  split([](Json& s) { s[1]["use_regex"] = true; }, "false after a Split");
  split([](Json& s) { s[1]["add_prefix_space"] = true; }, "false after a Split");
  split([](Json& s) { s.insert(s.begin(), s[0]); }, "a Sequence of one Split");
  split([](Json& s) { s[0]["type"] = "Digits"; }, "a Sequence of one Split");
  split([](Json& s) { s.erase(1); }, "a Sequence of one Split");
}

TEST_F(TokenizerFile, RefusesDamage) {
  for (const char* const text : {"", "{", "[]", "\"\xff\""}) {
    write(text);
    EXPECT_THAT([&] { Tokenizer::from_file(path()); },
                ThrowsMessage<ConfigError>(HasSubstr(path())));
  }
  refused([](Json& j) { j.erase("model"); }, "not a tokenizer.json ... \"model\"");
  refused([](Json& j) { j["model"]["vocab"].erase("q"); }, R"(no token "q" for byte 113)");
  refused([](Json& j) { j["model"]["vocab"]["a"] = "1"; }, R"(model.vocab "a" is "1")");
  refused([](Json& j) { j["model"]["vocab"]["a"] = -1; }, "id -1 ... at least 0");
  refused([](Json& j) { j["model"]["vocab"]["a"] = 1 << 30; }, "id 1073741824");
  refused([](Json& j) { j["model"]["vocab"]["a"] = 'b'; }, "id 98 ... another");
  refused(
      [](Json& j) {
        j["model"]["merges"][0] = {"a", "q"};
      },
      R"(model.merges[0] needs token "aq")");
  refused([](Json& j) { j["model"]["merges"][0] = "ab"; }, R"(model.merges[0] is "ab")");
  refused([](Json& j) { j["model"]["merges"][0] = "a b c"; }, R"(model.merges[0] is "a b c")");
  refused([](Json& j) { j["model"]["merges"][0] = 3; }, "model.merges[0] is 3");
  refused([](Json& j) { j["added_tokens"][0]["id"] = 300; }, "id 300 ... vocabulary ... 257");
  refused([](Json& j) { j["added_tokens"].push_back(j["added_tokens"][0]); }, "listed twice");
  refused([](Json& j) { j["added_tokens"][0]["content"] = ""; }, "not empty");
}

}  // namespace
}  // namespace lockstep::data
