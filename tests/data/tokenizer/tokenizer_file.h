// SPDX-License-Identifier: Apache-2.0
// A tokenizer.json of a test's own.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/data/tokenizer/tokenizer.h"
#include "tests/support/says.h"

namespace lockstep::data {

using Json = nlohmann::json;

// How GPT-2 writes a byte. Printable ones are themselves.
inline std::string symbol(int byte) {
  const auto utf8 = [](int code) {
    if (code < 0x80) return std::string{static_cast<char>(code)};
    return std::string{static_cast<char>(0xc0 | code >> 6), static_cast<char>(0x80 | (code & 63))};
  };
  if (byte <= 0x20) return utf8(0x100 + byte);
  if (byte >= 0x7f && byte <= 0xa0) return utf8(0x121 + byte - 0x7f);
  if (byte == 0xad) return utf8(0x143);
  return utf8(byte);
}

inline Json added(int id, const std::string& content, bool normalized = false) {
  return {{"id", id},        {"content", content},       {"single_word", false}, {"lstrip", false},
          {"rstrip", false}, {"normalized", normalized}, {"special", true}};
}

// Token b is the byte b; then the merges' tokens from 256 on, and <|endoftext|>.
inline Json gpt2_like(const std::vector<std::pair<std::string, std::string>>& merges) {
  Json vocab, pairs = Json::array();
  for (int byte = 0; byte < 256; ++byte) vocab[symbol(byte)] = byte;
  int next = 256;
  for (const auto& [left, right] : merges) {
    pairs.push_back({left, right});
    if (!vocab.contains(left + right)) vocab[left + right] = next++;
  }
  return {{"version", "1.0"},
          {"added_tokens", {added(next, "<|endoftext|>")}},
          {"normalizer", nullptr},
          {"pre_tokenizer",
           {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}}},
          {"model",
           {{"type", "BPE"},
            {"dropout", nullptr},
            {"continuing_subword_prefix", ""},
            {"end_of_word_suffix", ""},
            {"vocab", vocab},
            {"merges", pairs}}}};
}

class TokenizerFile : public testing::Test {
 protected:
  TokenizerFile() {
    auto name = testing::TempDir() + "tokenizer_test.XXXXXX";
    folder_ = mkdtemp(name.data());
  }
  ~TokenizerFile() override { std::filesystem::remove_all(folder_); }

  std::string path() const { return (folder_ / "tokenizer.json").string(); }
  void write(const std::string& text) const { std::ofstream(path()) << text; }
  Tokenizer load(const Json& json) const {
    write(json.dump());
    return Tokenizer::from_file(path());
  }
  void refused(const std::function<void(Json&)>& change, const std::string& message) const {
    auto json = gpt2_like({{"a", "b"}});
    change(json);
    EXPECT_THAT([&] { load(json); }, testing::ThrowsMessage<ConfigError>(testing::AllOf(
                                         testing::HasSubstr(path()), test::says(message))))
        << message;
  }

  std::filesystem::path folder_;
};

}  // namespace lockstep::data
