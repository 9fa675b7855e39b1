// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/tokens/token_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>

#include "lockstep/core/error.h"
#include "tests/support/says.h"
#include "tests/support/subprocess.h"

namespace lockstep::data {
namespace {

using test::read_file;
using test::says;
using test::TempDir;
using test::write_file;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::ThrowsMessage;
namespace fs = std::filesystem;

std::string from_hex(std::string_view text) {
  std::string bytes;
  std::string digits;
  for (const char c : text) {
    if (c != ' ') digits += c;
  }
  for (size_t i = 0; i < digits.size(); i += 2) {
    bytes += static_cast<char>(std::stoi(digits.substr(i, 2), nullptr, 16));
  }
  return bytes;
}

std::string padded(std::string bytes, size_t size) {
  bytes.resize(size, '\0');
  return bytes;
}

template <class T>
std::string with(const std::string& bytes, size_t at, T value) {
  char raw[sizeof value];
  std::memcpy(raw, &value, sizeof value);
  return bytes.substr(0, at) + std::string(raw, sizeof raw) + bytes.substr(at + sizeof raw);
}

std::vector<int64_t> all_of(const TokenFile& file) {
  std::vector<int64_t> tokens(static_cast<size_t>(file.size()));
  file.read(0, tokens);
  return tokens;
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    names.push_back(entry.path().filename());
  }
  std::sort(names.begin(), names.end());
  return names;
}

// Documents [1, 2, 3] and [4, 5], as the programs that defined the layouts write them.
const std::string kRaw = from_hex("0100 0200 0300 0400 0500");
const std::string kIndex = from_hex(
    "4d4d494449445800000100000000000000 08 0200000000000000 0300000000000000 03000000 02000000 "
    "0000000000000000 0600000000000000 0000000000000000 0100000000000000 0200000000000000");
const std::string kLlmc = padded(from_hex("88d83401 01000000 05000000"), 1024) + kRaw;
const std::string kLlmcWide = padded(from_hex("a1d93401 07000000 05000000"), 1024) +
                              from_hex("01000000 02000000 03000000 04000000 05000000");

void write_documents(const std::string& path, TokenLayout layout, int64_t width) {
  TokenFileWriter writer(path, layout, width);
  const int32_t tokens[] = {1, 2, 3, 4, 5};
  writer.write(std::span(tokens, 1));
  writer.write(std::span(tokens + 1, 2));
  writer.end_document();
  writer.write(std::span(tokens + 3, 2));
  writer.finish();
  EXPECT_EQ(writer.documents(), 2);
  EXPECT_EQ(writer.tokens(), 5);
}

class TokenFileTest : public testing::Test {
 protected:
  std::string path(const char* name = "x.bin") const { return dir_.path() + "/" + name; }

  void refused(const std::string& bytes, const char* rule) const {
    write_file(path(), bytes);
    EXPECT_THAT([&] { TokenFile::open(path()); }, ThrowsMessage<ConfigError>(says(rule)));
  }

  void index_refused(const std::string& index, const char* rule) const {
    write_file(path(), kRaw);
    write_file(path("x.idx"), index);
    EXPECT_THAT([&] { TokenFile::open(path()); }, ThrowsMessage<ConfigError>(says(rule)));
  }

  TempDir dir_;
};

TEST_F(TokenFileTest, ReadsEveryLayout) {
  write_file(path("raw.bin"), kRaw);
  write_file(path("llmc.bin"), kLlmc);
  write_file(path("wide.bin"), kLlmcWide);
  write_file(path("megatron.bin"), kRaw);
  write_file(path("megatron.idx"), kIndex);
  const std::tuple<const char*, TokenLayout, int64_t> cases[] = {
      {"raw.bin", TokenLayout::nanogpt, 2},
      {"llmc.bin", TokenLayout::llmc, 2},
      {"wide.bin", TokenLayout::llmc, 4},
      {"megatron.bin", TokenLayout::megatron, 2}};
  for (const auto& [name, kind, width] : cases) {
    const auto file = TokenFile::open(path(name));
    EXPECT_EQ(file.kind(), kind) << name;
    EXPECT_EQ(file.width(), width) << name;
    EXPECT_THAT(all_of(file), ElementsAre(1, 2, 3, 4, 5)) << name;
    int64_t two[2] = {};
    file.read(3, two);
    EXPECT_THAT(two, ElementsAre(4, 5)) << name;
    for (const int64_t begin : {int64_t{-1}, int64_t{4}, INT64_MAX}) {
      EXPECT_THROW(file.read(begin, two), ConfigError) << name;
    }
    EXPECT_EQ(file.tokens().max(0, 5), 5) << name;
    EXPECT_EQ(file.tokens().max(0, 3), 3) << name;
  }
}

TEST_F(TokenFileTest, ReadsEveryIntegerOfMegatron) {
  const std::tuple<uint8_t, std::string, int64_t> cases[] = {
      {1, from_hex("01ff03"), 255},
      {3, from_hex("0100ffff0300"), -1},
      {4, from_hex("01000000 ffffff7f 03000000"), 0x7fffffff},
      {5, from_hex("0100000000000000 0000000001000000 0300000000000000"), int64_t{1} << 32},
      {8, from_hex("0100ffff0300"), 65535}};
  for (const auto& [type, bytes, second] : cases) {
    // One sequence of three tokens.
    std::string index = kIndex.substr(0, 34) + from_hex("03000000 0000000000000000") +
                        from_hex("0000000000000000 0100000000000000");
    index = with(with(with(index, 17, type), 18, uint64_t{1}), 26, uint64_t{2});
    write_file(path(), bytes);
    write_file(path("x.idx"), index);
    EXPECT_THAT(all_of(TokenFile::open(path())), ElementsAre(1, second, 3)) << int{type};
  }
}

TEST_F(TokenFileTest, Names) {
  for (const auto layout : {TokenLayout::llmc, TokenLayout::nanogpt, TokenLayout::megatron}) {
    EXPECT_EQ(token_layout(name_of(layout)), layout);
  }
  EXPECT_THROW(token_layout("parquet"), ConfigError);
}

TEST_F(TokenFileTest, RefusesDamagedShards) {
  refused(kRaw.substr(0, 9), "9 bytes ... without a header ... uint16");
  refused(kLlmc.substr(0, 1033), "says 5 tokens of 2 bytes, but 9 bytes follow");
  refused(kLlmc + "xx", "says 5 tokens of 2 bytes, but 12 bytes follow");
  refused(kLlmc.substr(0, 1000), "has 1000 bytes, an llm.c header has 1024");
  refused(kLlmc.substr(0, 4), "has 4 bytes, an llm.c header has 1024");
  refused(with(kLlmc, 4, 2), "version 2, must be 1");
  refused(with(kLlmcWide, 4, 1), "version 1, must be 7");
  refused(with(kLlmc, 8, -5), "says -5 tokens");
  refused(with(kLlmc, 8, INT32_MAX), "says 2147483647 tokens");
  refused(with(kLlmc, 0, 20240522), "evaluation file");
  EXPECT_THROW(TokenFile::open(path("missing.bin")), SystemError);
}

TEST_F(TokenFileTest, RefusesDamagedIndices) {
  for (size_t size = 0; size < kIndex.size(); ++size) {
    index_refused(kIndex.substr(0, size), size < 34 ? "do not begin" : "asks for");
  }
  index_refused(kIndex + "x", "has 83 bytes");
  index_refused(with(kIndex, 0, 'X'), "do not begin");
  index_refused(with(kIndex, 9, uint64_t{2}), "version 2, must be 1");
  for (const uint8_t type : {0, 2, 6, 7, 9, 255}) {
    index_refused(with(kIndex, 17, type), "type ... 1, 3, 4, 5 or 8");
  }
  // 12 x 2^62 and 8 x 2^61 are 0 in 64 bits: these sizes would seem to fit.
  constexpr uint64_t kMany = (uint64_t{1} << 62) + 2, kBorders = (uint64_t{1} << 61) + 3;
  for (const uint64_t count : {uint64_t{1}, uint64_t{3}, kMany, ~uint64_t{0}}) {
    index_refused(with(kIndex, 18, count), "header asks for");
  }
  for (const uint64_t count : {uint64_t{2}, uint64_t{4}, kBorders, ~uint64_t{0}}) {
    index_refused(with(kIndex, 26, count), "header asks for");
  }
  index_refused(with(kIndex, 34, int32_t{-3}), "sequence 0 has -3 tokens");
  index_refused(with(kIndex, 38, int32_t{1}), "end at byte 8, but .bin has 10 bytes");
  index_refused(with(kIndex, 38, int32_t{3}), "ends at byte 12, but .bin has 10 bytes");
  index_refused(with(kIndex, 38, INT32_MAX), "but .bin has 10 bytes");
  index_refused(with(kIndex, 50, int64_t{8}), "sequence 1 is at byte 8, must follow");
  index_refused(with(kIndex, 50, int64_t{-6}), "sequence 1 is at byte -6, must follow");
  index_refused(with(kIndex, 58, int64_t{1}), "document border 0 is sequence 1");
  index_refused(with(kIndex, 66, int64_t{-1}), "document border 1 is sequence -1");
  index_refused(with(kIndex, 74, int64_t{3}), "document border 2 is sequence 3");
  index_refused(with(kIndex, 74, int64_t{1}), "ends at sequence 1 of 2");
  write_file(path(), kRaw.substr(0, 8));
  write_file(path("x.idx"), kIndex);
  EXPECT_THAT([&] { TokenFile::open(path()); },
              ThrowsMessage<ConfigError>(HasSubstr("but .bin has 8 bytes")));
}

TEST_F(TokenFileTest, WritesWhatOthersWrite) {
  write_documents(path("raw.bin"), TokenLayout::nanogpt, 2);
  EXPECT_EQ(read_file(path("raw.bin")), kRaw);
  write_documents(path("llmc.bin"), TokenLayout::llmc, 2);
  EXPECT_EQ(read_file(path("llmc.bin")), kLlmc);
  write_documents(path("wide.bin"), TokenLayout::llmc, 4);
  EXPECT_EQ(read_file(path("wide.bin")), kLlmcWide);
  write_documents(path("megatron.bin"), TokenLayout::megatron, 2);
  EXPECT_EQ(read_file(path("megatron.bin")), kRaw);
  EXPECT_EQ(read_file(path("megatron.idx")), kIndex);
  write_documents(path("megatron_wide.bin"), TokenLayout::megatron, 4);
  const auto wide = TokenFile::open(path("megatron_wide.bin"));
  EXPECT_EQ(wide.width(), 4);
  EXPECT_THAT(all_of(wide), ElementsAre(1, 2, 3, 4, 5));
  EXPECT_EQ(names_in(dir_.path()).size(), 7u);
}

TEST_F(TokenFileTest, WritesMoreThanOneBuffer) {
  std::vector<int32_t> tokens(700'000);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i % 65536);
  TokenFileWriter writer(path(), TokenLayout::llmc, 2);
  writer.write(tokens);
  writer.write(tokens);
  writer.finish();
  const auto file = TokenFile::open(path());
  ASSERT_EQ(file.size(), 1'400'000);
  int64_t two[2] = {};
  file.read(699'999, two);
  EXPECT_THAT(two, ElementsAre(699'999 % 65536, 0));
}

TEST_F(TokenFileTest, NothingIsLeftWithoutFinish) {
  write_file(path(), kRaw);
  {
    TokenFileWriter writer(path(), TokenLayout::megatron, 2);
    const int32_t tokens[] = {1, 70'000};
    EXPECT_EQ(names_in(dir_.path()).size(), 2u);
    EXPECT_THAT([&] { writer.write(tokens); },
                ThrowsMessage<ConfigError>(HasSubstr("token 70000 does not fit 2 bytes")));
    const int32_t negative[] = {-1};
    EXPECT_THROW(writer.write(negative), ConfigError);
  }
  EXPECT_THAT(names_in(dir_.path()), ElementsAre("x.bin"));
  EXPECT_EQ(read_file(path()), kRaw);
}

// Two writers to one target do not disturb each other; the later one stays.
TEST_F(TokenFileTest, WritersHaveTheirOwnPart) {
  TokenFileWriter one(path(), TokenLayout::nanogpt, 2), two(path(), TokenLayout::nanogpt, 2);
  const int32_t first[] = {1, 2, 3}, second[] = {9};
  one.write(first);
  two.write(second);
  one.finish();
  EXPECT_THAT(all_of(TokenFile::open(path())), ElementsAre(1, 2, 3));
  two.finish();
  EXPECT_THAT(all_of(TokenFile::open(path())), ElementsAre(9));
  EXPECT_THAT(names_in(dir_.path()), ElementsAre("x.bin"));
}

TEST_F(TokenFileTest, WriterRules) {
  const auto refuse = [&](const char* name, TokenLayout layout, int64_t width, const char* rule) {
    EXPECT_THAT([&] { TokenFileWriter(path(name), layout, width); },
                ThrowsMessage<ConfigError>(says(rule)));
  };
  refuse("x.tokens", TokenLayout::llmc, 2, "must end in .bin");
  refuse("x.bin", TokenLayout::nanogpt, 4, "nanogpt has 2");
  refuse("x.bin", TokenLayout::megatron, 8, "megatron has 2 or 4");
  EXPECT_THROW(TokenFileWriter(path("no/such/x.bin"), TokenLayout::llmc, 2), SystemError);
  write_file(path("x.idx"), kIndex);
  refuse("x.bin", TokenLayout::llmc, 2, "Megatron's");
  EXPECT_THAT(names_in(dir_.path()), ElementsAre("x.idx"));
}

}  // namespace
}  // namespace lockstep::data
