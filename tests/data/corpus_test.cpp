// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/corpus.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/input_file.h"
#include "lockstep/data/batch_reader.h"
#include "lockstep/data/text_files.h"
#include "lockstep/data/tokens/token_file.h"
#include "tests/data/tokenizer/small_tokenizer.h"
#include "tests/support/says.h"
#include "tests/support/subprocess.h"

namespace lockstep::data {
namespace {

using test::says;
using test::TempDir;
using test::write_file;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::ThrowsMessage;

std::vector<int64_t> read(const Corpus& corpus, int64_t begin, int64_t count) {
  std::vector<int64_t> tokens(static_cast<size_t>(count));
  corpus.read(begin, tokens);
  return tokens;
}

std::string text_of(const Corpus& corpus) {
  std::string text;
  for (const int64_t token : read(corpus, 0, corpus.size())) text += static_cast<char>(token);
  return text;
}

class CorpusTest : public testing::Test {
 protected:
  std::string path(const std::string& name) const { return dir_.path() + "/" + name; }

  std::string write(const std::string& name, const std::string& text) const {
    write_file(path(name), text);
    return path(name);
  }

  std::string write_tokens(const std::string& name, std::vector<int32_t> tokens,
                           TokenLayout layout = TokenLayout::nanogpt) const {
    TokenFileWriter writer(path(name), layout, 2);
    writer.write(tokens);
    writer.finish();
    return path(name);
  }

  Corpus open(const std::string& data_path) const {
    return Corpus::open(data_path, Tokenizer::bytes());
  }

  TempDir dir_;
};

TEST_F(CorpusTest, TextIsItsBytes) {
  const auto corpus = open(write("a", "ab\xff\n"));
  EXPECT_EQ(corpus.size(), 4);
  EXPECT_THAT(read(corpus, 0, 4), ElementsAre('a', 'b', 255, '\n'));
  EXPECT_EQ(corpus.max_token(2), 'b');
  EXPECT_EQ(corpus.max_token(1000), 255);
  EXPECT_EQ(corpus.max_token(0), -1);
  EXPECT_EQ(corpus.describe(), "1 file, 0.0 kB of text, 4 tokens");
}

// Small files are copied and large ones mapped; a read over every border gives the same stream.
TEST_F(CorpusTest, ManyFilesAreOneStream) {
  std::string whole, list;
  const size_t sizes[] = {3, 70'000, 1, 65'536, 65'535, 2};
  for (size_t i = 0; i < std::size(sizes); ++i) {
    std::string text;
    for (size_t k = 0; k < sizes[i]; ++k) text += static_cast<char>(1 + (k * 7 + i) % 251);
    list += (list.empty() ? "" : ",") + write("f" + std::to_string(i), text);
    whole += text;
  }
  const auto corpus = open(list);
  EXPECT_EQ(text_of(corpus), whole);
  for (const int64_t begin : {0, 2, 3, 69'990, 70'003, 70'004, 135'000, 201'070}) {
    const auto tokens = read(corpus, begin, 7);
    for (size_t i = 0; i < tokens.size(); ++i) {
      ASSERT_EQ(tokens[i], static_cast<unsigned char>(whole[static_cast<size_t>(begin) + i]));
    }
  }
  EXPECT_EQ(corpus.max_token(corpus.size()), 251);
  EXPECT_EQ(corpus.locate(70'002), path("f1") + ", token 69999");
  EXPECT_EQ(corpus.locate(70'003), path("f2") + ", token 0");
  EXPECT_EQ(corpus.describe(), "6 files, 201.1 kB of text, 201077 tokens");
}

TEST_F(CorpusTest, RangesAreChecked) {
  const auto corpus = open(write("a", "abcdef"));
  int64_t two[2] = {};
  for (const int64_t begin : {int64_t{-1}, int64_t{5}, INT64_MAX}) {
    EXPECT_THROW(corpus.read(begin, two), ConfigError);
  }
  EXPECT_NO_THROW(corpus.read(6, {}));
  EXPECT_THROW(corpus.slice(-1, 2), ConfigError);
  EXPECT_THROW(corpus.slice(3, 2), ConfigError);
  EXPECT_THROW(corpus.slice(3, 7), ConfigError);
  EXPECT_THROW(corpus.locate(6), ConfigError);
  EXPECT_THROW(corpus.locate(-1), ConfigError);
}

TEST_F(CorpusTest, SlicesShareTheData) {
  auto part = open(write("a", "zabc") + "," + write("b", "defy")).slice(1, 7).slice(1, 5);
  EXPECT_EQ(text_of(part), "bcde");
  EXPECT_EQ(part.size(), 4);
  EXPECT_EQ(part.max_token(4), 'e');
  EXPECT_EQ(part.max_token(2), 'c');
  EXPECT_EQ(part.slice(2, 2).max_token(1), -1);
  EXPECT_EQ(part.locate(2), path("b") + ", token 0");
  EXPECT_EQ(part.describe(), "4 of the 8 tokens of 2 files, 0.0 kB of text");
  int64_t two[2] = {};
  EXPECT_THROW(part.read(3, two), ConfigError);  // the data goes on, the slice does not
}

TEST_F(CorpusTest, TokenFilesOfAnyLayout) {
  write_tokens("a.bin", {1, 2, 3}, TokenLayout::megatron);
  write_tokens("b.bin", {300, 65535}, TokenLayout::llmc);
  write_tokens("c.bin", {}, TokenLayout::llmc);
  write_tokens("d.bin", {7});
  const auto corpus =
      open(path("a.bin") + "," + path("b.bin") + "," + path("c.bin") + "," + path("d.bin"));
  EXPECT_THAT(read(corpus, 0, 6), ElementsAre(1, 2, 3, 300, 65535, 7));
  EXPECT_EQ(corpus.max_token(4), 300);
  EXPECT_EQ(corpus.max_token(6), 65535);
  EXPECT_EQ(corpus.locate(5), path("d.bin") + ", token 0");
  EXPECT_EQ(corpus.describe(), "4 files, 0.0 kB of token ids, 6 tokens");
  // .idx files are no data of their own.
  EXPECT_EQ(open(dir_.path()).size(), 6);
}

// With two and with four bytes a token.
TEST_F(CorpusTest, OtherTokenizersEncodeTheText) {
  const std::string list = write("a", "first") + "," + write("b", "2nd") + "," + write("c", "last");
  for (const int end : {256, 65535, 65536}) {
    test::write_small_tokenizer(path("tokenizer.json"), end);
    const auto tokenizer = Tokenizer::open(path("tokenizer.json"));
    const auto corpus = Corpus::open(list, tokenizer);
    std::vector<int64_t> expected;
    for (const char* text : {"first", "2nd", "last"}) {
      if (!expected.empty()) expected.push_back(end);
      for (const int32_t token : tokenizer.encode(text)) expected.push_back(token);
    }
    EXPECT_EQ(read(corpus, 0, corpus.size()), expected);
    EXPECT_EQ(corpus.max_token(corpus.size()), end);
    EXPECT_EQ(corpus.locate(6), path("b") + ", token 0");
    EXPECT_EQ(corpus.describe(), "3 files, 0.0 kB of text, 14 tokens");
  }
}

TEST_F(CorpusTest, RefusesWhatCannotBeOneStream) {
  write("a.txt", "text");
  write_tokens("b.bin", {1});
  EXPECT_THAT([&] { open(dir_.path()); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("text"), HasSubstr("token ids"))));
  write_tokens("empty.bin", {}, TokenLayout::llmc);
  EXPECT_THAT([&] { open(path("empty.bin")); },
              ThrowsMessage<ConfigError>(HasSubstr("has no tokens")));
  EXPECT_THAT([&] { open(path("none")); }, ThrowsMessage<ConfigError>(HasSubstr(path("none"))));
}

TEST_F(CorpusTest, SaysWhatItPassedOver) {
  std::filesystem::create_directory(path("f"));
  write("f/a", "text");
  write("f/b", std::string("a\0", 2));
  std::filesystem::create_symlink("gone", path("f/c"));
  EXPECT_EQ(open(path("f")).describe(),
            "1 file, 0.0 kB of text, 4 tokens, 1 binary skipped, 1 unreadable skipped");
}

TEST_F(CorpusTest, HoldOutIsTheEnd) {
  const auto corpus = open(write("a", "0123456789"));
  const auto [train, validation] = hold_out(corpus, 0.25);
  EXPECT_EQ(text_of(train), "01234567");
  EXPECT_EQ(text_of(validation), "89");
  EXPECT_EQ(hold_out(corpus, 0).validation.size(), 0);
  EXPECT_EQ(hold_out(corpus, 0).train.size(), 10);
  for (const double fraction : {-0.1, 1.0, 2.0, std::nan("")}) {
    EXPECT_THROW(hold_out(corpus, fraction), ConfigError);
  }
}

void shorten(const std::string& path, off_t size) { ASSERT_EQ(truncate(path.c_str(), size), 0); }

TEST_F(CorpusTest, AFileThatShrinksIsNamed) {
  const std::string text = write("long.txt", std::string(200'000, 'a'));
  const std::string ids =
      write_tokens("ids.bin", std::vector<int32_t>(100'000, 7), TokenLayout::llmc);
  for (const std::string& file : {text, ids}) {
    const Corpus corpus = open(file);
    EXPECT_EQ(read(corpus, 99'000, 10).size(), 10u);
    shorten(file, 14'000);
    EXPECT_EQ(read(corpus, 0, 100).size(), 100u);  // what is left is right
    const auto named = testing::AllOf(HasSubstr(file), HasSubstr("14000 now"));
    EXPECT_THAT([&] { read(corpus, 99'000, 10); }, ThrowsMessage<DataError>(named));
    EXPECT_THAT([&] { corpus.max_token(100'000); }, ThrowsMessage<DataError>(named));
    EXPECT_THAT([&] { corpus.identity(); }, ThrowsMessage<DataError>(named));
    // On the thread of a reader of batches, and what it says comes through.
    EXPECT_THAT(
        [&] {
          BatchReader reader(corpus, {.seq_len = 1000, .micro_batch = 4, .vocab = 256});
          for (int i = 0; i < 100; ++i) reader.next();
        },
        ThrowsMessage<DataError>(named));
  }
}

// More files than are kept open.
TEST_F(CorpusTest, ManyFilesAreReadWithFewDescriptors) {
  constexpr int64_t kFiles = 300, kTokens = 40'000;
  std::filesystem::create_directory(path("many"));
  for (int64_t i = 0; i < kFiles; ++i) {
    write("many/" + std::to_string(i) + ".bin", "");
    shorten(path("many/" + std::to_string(i) + ".bin"), 2 * kTokens);
  }
  const auto descriptors = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
  };
  const auto before = descriptors();
  const Corpus corpus = open(path("many"));
  EXPECT_LE(descriptors() - before, 260);
  ASSERT_EQ(corpus.size(), kFiles * kTokens);
  EXPECT_EQ(corpus.max_token(corpus.size()), 0);
  const std::string last = corpus.locate(corpus.size() - 1);
  const std::string file = last.substr(0, last.find(','));
  shorten(file, 100);
  EXPECT_THAT([&] { read(corpus, corpus.size() - 1, 1); },
              ThrowsMessage<DataError>(HasSubstr(file)));
  write("other", std::string(2 * kTokens, '\0'));
  std::filesystem::rename(path("other"), file);
  EXPECT_THAT([&] { read(corpus, corpus.size() - 1, 1); },
              ThrowsMessage<DataError>(testing::AllOf(HasSubstr(file), HasSubstr("replaced"))));
}

TEST_F(CorpusTest, IdentityIsThatOfTheContent) {
  const std::string text = std::string(70'000, 'a') + std::string(70'000, 'b');
  const auto identity = open(write("one.txt", text)).identity();
  EXPECT_EQ(identity.tokens, 140'000);
  EXPECT_EQ(open(write("moved.txt", text)).identity(), identity);
  const std::string first = write("1.txt", std::string(70'000, 'a'));
  EXPECT_EQ(open(first + "," + write("2.txt", std::string(70'000, 'b'))).identity(), identity);
  std::string other = text;
  other[100'000] = 'c';
  EXPECT_NE(open(write("other.txt", other)).identity(), identity);
  EXPECT_NE(open(write("short.txt", text.substr(1))).identity(), identity);
  // Of much data the ends are looked at, whatever else is.
  write("large.bin", "");
  shorten(path("large.bin"), off_t{1} << 26);
  const auto large = open(path("large.bin")).identity();
  EXPECT_TRUE(large.is_sampled());
  EXPECT_EQ(open(path("large.bin")).identity(), large);
  std::fstream(path("large.bin"), std::ios::in | std::ios::out | std::ios::binary)
      .seekp((off_t{1} << 26) - 1)
      .put('x');
  EXPECT_NE(open(path("large.bin")).identity(), large);
}

}  // namespace
}  // namespace lockstep::data
