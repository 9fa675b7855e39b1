// SPDX-License-Identifier: Apache-2.0
// `lockstep data pack` as a user meets it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "lockstep/data/corpus.h"
#include "lockstep/data/tokens/token_file.h"
#include "tests/data/tokenizer/small_tokenizer.h"
#include "tests/support/says.h"
#include "tests/support/subprocess.h"

namespace lockstep::test {
namespace {

using ::testing::HasSubstr;
using ::testing::MatchesRegex;
namespace fs = std::filesystem;

class DataPack : public ::testing::Test {
 protected:
  DataPack() {
    fs::create_directory(path("text"));
    write_file(path("text/a"), "alpha\n");
    write_file(path("text/b"), "beta\n");
    write_file(path("text/c"), std::string("\0", 1));
  }

  std::string path(const std::string& name) const { return dir_.path() + "/" + name; }

  Result pack(const std::string& output, const std::vector<std::string>& more = {}) const {
    std::vector<std::string> words{"data",       "pack",     "--input",
                                   path("text"), "--output", path(output)};
    words.insert(words.end(), more.begin(), more.end());
    return lockstep_command(words);
  }

  TempDir dir_;
};

TEST_F(DataPack, AllLayoutsHoldWhatTheTextHolds) {
  const auto text = data::Corpus::open(path("text"), data::Tokenizer::bytes());
  std::vector<int64_t> expected(11);
  text.read(0, expected);
  for (const std::string layout : {"llm.c", "nanogpt", "megatron"}) {
    const std::string output = layout + ".bin";
    const Result result = pack(output, {"--layout", layout});
    ASSERT_EQ(result.code, 0) << result.err;
    EXPECT_THAT(result.out, MatchesRegex(".*" + output +
                                         ": 2 documents, 11 tokens, [0-9]+ bytes, [0-9.]+ "
                                         "seconds\n"));
    EXPECT_THAT(result.err, HasSubstr("skipped 1 binary file and 0 unreadable files"));
    const auto file = data::TokenFile::open(path(output));
    EXPECT_EQ(data::name_of(file.kind()), layout);
    std::vector<int64_t> tokens(11);
    ASSERT_EQ(file.size(), 11);
    file.read(0, tokens);
    EXPECT_EQ(tokens, expected);
  }
  EXPECT_TRUE(fs::exists(path("megatron.idx")));
}

TEST_F(DataPack, AFileLongerThanOneCut) {
  std::string text;
  for (int i = 0; text.size() < 2'500'000; ++i) text += std::to_string(i) + "\n";
  write_file(path("long"), text);
  const Result result =
      lockstep_command({"data", "pack", "--input", path("long"), "--output", path("long.bin")});
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("1 document, " + std::to_string(text.size()) + " tokens"));
  const auto file = data::TokenFile::open(path("long.bin"));
  std::vector<int64_t> tokens(text.size());
  ASSERT_EQ(file.size(), static_cast<int64_t>(text.size()));
  file.read(0, tokens);
  EXPECT_TRUE(std::equal(tokens.begin(), tokens.end(), text.begin()));
}

TEST_F(DataPack, EndOfTextFollowsEachDocument) {
  for (const auto& [end, width] : {std::pair{256, 2}, std::pair{65536, 4}}) {
    write_small_tokenizer(path("tokenizer.json"), end);
    const Result result = pack("x.bin", {"--layout", "megatron", "--force", "--tokenizer",
                                         path("tokenizer.json"), "--append-end-of-text"});
    ASSERT_EQ(result.code, 0) << result.err;
    EXPECT_THAT(result.out, HasSubstr("2 documents, 13 tokens"));
    const auto file = data::TokenFile::open(path("x.bin"));
    EXPECT_EQ(file.width(), width);
    std::vector<int64_t> tokens(13);
    file.read(0, tokens);
    EXPECT_EQ(std::count(tokens.begin(), tokens.end(), end), 2);
    EXPECT_EQ(tokens.back(), end);
  }
  // 65536 does not fit nanoGPT's two bytes.
  EXPECT_THAT(pack("y.bin", {"--layout", "nanogpt", "--tokenizer", path("tokenizer.json")}).err,
              HasSubstr("nanogpt has 2"));
}

TEST_F(DataPack, RecordsOfJsonLinesAreDocuments) {
  write_file(path("a.jsonl"), "{\"text\": \"ab\"}\n{\"text\": \"c\\n\"}\n");
  const auto pack_records = [&] {
    return lockstep_command({"data", "pack", "--input", path("a.jsonl"), "--output", path("a.bin"),
                             "--layout", "megatron"});
  };
  const Result result = pack_records();
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("2 documents, 4 tokens"));
  std::vector<int64_t> tokens(4);
  data::TokenFile::open(path("a.bin")).read(0, tokens);
  EXPECT_THAT(tokens, ::testing::ElementsAre('a', 'b', 'c', '\n'));
  // A token file cannot say which tokens count.
  fs::remove(path("a.bin"));
  fs::remove(path("a.idx"));
  write_file(path("a.jsonl"), "{\"prompt\": \"ab\", \"completion\": \"c\"}\n");
  const Result refused = pack_records();
  EXPECT_EQ(refused.code, 2);
  EXPECT_THAT(refused.err, HasSubstr(path("a.jsonl") + ":1"));
  EXPECT_FALSE(fs::exists(path("a.bin")));
}

TEST_F(DataPack, ReplacesOnlyByForce) {
  write_file(path("x.bin"), "mine");
  Result result = pack("x.bin");
  EXPECT_EQ(result.code, 2);
  EXPECT_THAT(result.err, HasSubstr("x.bin exists; --force replaces it"));
  EXPECT_EQ(read_file(path("x.bin")), "mine");
  EXPECT_EQ(pack("x.bin", {"--force"}).code, 0);
  EXPECT_EQ(data::TokenFile::open(path("x.bin")).size(), 11);
  fs::remove(path("x.bin"));
  write_file(path("x.idx"), "mine");
  EXPECT_THAT(pack("x.bin", {"--layout", "megatron"}).err, HasSubstr("x.idx exists; --force"));
}

TEST_F(DataPack, WrongUseIsOneLineAndLeavesNothing) {
  const std::pair<Result, const char*> cases[] = {
      {pack("x.txt"), "must end in .bin"},
      {pack("x.bin", {"--layout", "parquet"}), "'parquet' ... llm.c, nanogpt, megatron"},
      {pack("x.bin", {"--append-end-of-text"}), "tokenizer bytes ... end-of-text"},
      {lockstep_command({"data", "pack", "--output", path("x.bin")}), "--input is required"},
      {lockstep_command({"data", "pack", "--input", path("none"), "--output", path("x.bin")}),
       "none: No such file"},
      {lockstep_command({"data", "unpack"}), "data: unknown subcommand 'unpack'"},
      {lockstep_command({"data"}), "data: unknown subcommand ''"}};
  for (const auto& [result, words] : cases) {
    EXPECT_EQ(result.code, 2);
    EXPECT_THAT(result.err, says(words));
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  }
  write_file(path("text/tokens.bin"), "xx");
  EXPECT_THAT(pack("x.bin").err, says("token ids already"));
  fs::remove_all(path("text"));
  EXPECT_TRUE(fs::is_empty(dir_.path()));
}

}  // namespace
}  // namespace lockstep::test
