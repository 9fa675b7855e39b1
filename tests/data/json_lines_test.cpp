// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/json_lines.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/data/batch_reader.h"
#include "lockstep/data/corpus.h"
#include "tests/data/tokenizer/small_tokenizer.h"
#include "tests/support/subprocess.h"

namespace lockstep::data {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using testing::ThrowsMessage;

constexpr int64_t kEnd = 256, kNone = kIgnoredTarget;

class JsonLinesTest : public testing::Test {
 protected:
  JsonLinesTest() { test::write_small_tokenizer(path("tokenizer.json"), kEnd); }

  std::string path(const std::string& name) const { return dir_.path() + "/" + name; }
  Corpus open(const std::string& name, const std::string& text,
              const Tokenizer& tokenizer = Tokenizer::bytes()) const {
    test::write_file(path(name), text);
    return Corpus::open(path(name), tokenizer);
  }
  Tokenizer with_end() const { return Tokenizer::from_file(path("tokenizer.json")); }
  void expect_refused(const std::string& text, const std::string& fact,
                      const std::string& other = "") const {
    EXPECT_THAT([&] { open("bad.jsonl", text); },
                ThrowsMessage<ConfigError>(AllOf(HasSubstr(fact), HasSubstr(other))))
        << text;
  }

  test::TempDir dir_;
};

std::string tokens_of(const Corpus& corpus) {
  std::vector<int64_t> tokens(static_cast<size_t>(corpus.size()));
  corpus.read(0, tokens);
  std::string text;
  for (const int64_t token : tokens) text += token == kEnd ? '$' : static_cast<char>(token);
  return text;
}

TEST_F(JsonLinesTest, TextIsAStreamOfDocuments) {
  const std::string text =
      "{\"text\": \"ab\\u00e9\"}\r\n\n{\"id\": 7, \"text\": \"\"}\n{\"text\": \"c\\nd\"}";
  EXPECT_EQ(tokens_of(open("a.jsonl", text)),
            "ab\xc3\xa9"
            "c\nd");  // bytes have no end of text
  test::write_file(path("b.jsonl"), "{\"text\": \"e\"}\n");
  const auto both = Corpus::open(path("a.jsonl") + "," + path("b.jsonl"), with_end());
  EXPECT_EQ(tokens_of(both), "ab\xc3\xa9$c\nd$e");
  EXPECT_FALSE(both.has_examples());
  EXPECT_FALSE(both.has_token_ids());
  EXPECT_EQ(both.describe(), "2 files, 0.1 kB of JSON lines, 10 tokens");
}

TEST_F(JsonLinesTest, OnlyCompletionsAreTargets) {
  const std::string text =
      "{\"prompt\": \"abc\", \"completion\": \"de\"}\n"
      "{\"completion\": \"xyz\", \"prompt\": \"a\"}\n";
  const auto corpus = open("a.jsonl", text, with_end());
  EXPECT_EQ(tokens_of(corpus), "abcde$axyz$");
  EXPECT_EQ(corpus.describe(), "2 examples in 1 file, 0.1 kB of JSON lines, 11 tokens");
  EXPECT_THAT(corpus.examples(), ElementsAre(Example{0, 3, 6}, Example{6, 7, 11}));
  // A row more than there are is padding.
  const Batch batch =
      evaluation_batch(corpus, {.seq_len = 6, .vocab = 257, .first_window = 0, .rows = 3});
  EXPECT_THAT(batch.input,
              ElementsAre('a', 'b', 'c', 'd', 'e', 0, 'a', 'x', 'y', 'z', 0, 0, 0, 0, 0, 0, 0, 0));
  EXPECT_THAT(batch.target, ElementsAre(kNone, kNone, 'd', 'e', kEnd, kNone, 'x', 'y', 'z', kEnd,
                                        kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone));
  EXPECT_EQ(evaluation_windows(corpus, 6), 2);
  EXPECT_EQ(sample_count(corpus, 6), 2);
  // Without an end of text the completion ends the row.
  EXPECT_THAT(open("b.jsonl", text).examples(), ElementsAre(Example{0, 3, 5}, Example{5, 6, 9}));
}

TEST_F(JsonLinesTest, LongExamplesAreCut) {
  const auto corpus = open("a.jsonl",
                           "{\"prompt\": \"abc\", \"completion\": \"de\"}\n"
                           "{\"prompt\": \"abcd\", \"completion\": \"e\"}\n");
  const auto kept = corpus.answered(3);
  EXPECT_THAT(kept.examples(), ElementsAre(Example{0, 3, 5}));
  const Batch batch =
      evaluation_batch(kept, {.seq_len = 3, .vocab = 257, .first_window = 0, .rows = 1});
  EXPECT_THAT(batch.input, ElementsAre('a', 'b', 'c'));
  EXPECT_THAT(batch.target, ElementsAre(kNone, kNone, 'd'));
  EXPECT_TRUE(corpus.answered(2).examples().empty());
  EXPECT_EQ(corpus.answered(4).examples().size(), 2U);
}

TEST_F(JsonLinesTest, ExamplesAreHeldOutAsAWhole) {
  std::string text;
  for (int i = 0; i < 10; ++i)
    text += "{\"prompt\": \"" + std::string(1 + i, 'p') + "\", \"completion\": \"c\"}\n";
  const auto corpus = open("a.jsonl", text);
  const auto [train, validation] = hold_out(corpus, 0.25);
  EXPECT_EQ(train.examples().size(), 8U);
  EXPECT_THAT(validation.examples(), ElementsAre(Example{0, 9, 10}, Example{10, 20, 21}));
  EXPECT_EQ(tokens_of(validation), "pppppppppcppppppppppc");
  EXPECT_EQ(hold_out(corpus, 0.1).validation.describe(),
            "1 example in 11 of the 65 tokens of 1 file, 0.4 kB of JSON lines");
  EXPECT_EQ(hold_out(corpus, 0).validation.examples().size(), 0U);
  EXPECT_EQ(hold_out(corpus, 0).train.examples().size(), 10U);
}

// The same tokens, of which others count.
TEST_F(JsonLinesTest, IdentityCoversWhatCounts) {
  const auto one = open("a.jsonl", "{\"prompt\": \"abc\", \"completion\": \"de\"}\n");
  const auto other = open("b.jsonl", "{\"prompt\": \"ab\", \"completion\": \"cde\"}\n");
  const auto plain = open("c.jsonl", "{\"text\": \"abcde\"}\n");
  EXPECT_NE(one.identity(), other.identity());
  EXPECT_NE(one.identity(), plain.identity());
  EXPECT_EQ(one.identity(),
            open("d.jsonl", "{\"completion\":\"de\",\"prompt\":\"abc\"}").identity());
  EXPECT_EQ(plain.identity(), open("e.txt", "abcde").identity());
}

// All ranks and micro-batches of a step divide by one number, which is that of all of them.
TEST_F(JsonLinesTest, StepsCountTheTargetsOfAllRanks) {
  std::string text;
  for (int i = 0; i < 11; ++i) {
    text += "{\"prompt\": \"" + std::string(1 + i % 3, 'p') + "\", \"completion\": \"" +
            std::string(1 + i * i % 7, 'c') + "\"}\n";
  }
  const auto corpus = open("a.jsonl", text).answered(6);
  const auto count = [](const Batch& batch) {
    return std::ranges::count_if(batch.target, [](int64_t target) { return target != kNone; });
  };
  constexpr int kSteps = 5;
  std::vector<int64_t> expected;
  BatchReader alone(corpus, {.seq_len = 6, .micro_batch = 4, .seed = 3, .vocab = 256});
  EXPECT_EQ(alone.samples(), 11);
  for (int step = 0; step < kSteps; ++step) {
    const Batch batch = alone.next();
    EXPECT_EQ(batch.step_targets, count(batch));
    EXPECT_GE(batch.step_inputs, batch.step_targets);
    expected.push_back(batch.step_targets);
  }
  EXPECT_NE(expected[0], expected[1]);  // or the test shows nothing
  std::vector<int64_t> found(kSteps, 0);
  for (int64_t rank = 0; rank < 2; ++rank) {
    BatchReader reader(corpus, {.seq_len = 6,
                                .micro_batch = 1,
                                .accumulation = 2,
                                .dp = 2,
                                .dp_rank = rank,
                                .seed = 3,
                                .vocab = 256});
    for (int i = 0; i < 2 * kSteps; ++i) {
      const Batch batch = reader.next();
      EXPECT_EQ(batch.step_targets, expected[static_cast<size_t>(i / 2)]);
      found[static_cast<size_t>(i / 2)] += count(batch);
    }
  }
  EXPECT_EQ(found, expected);
}

TEST_F(JsonLinesTest, RefusesRecordsWithTheirLine) {
  const std::string good = "{\"text\": \"a\"}\n";
  const std::string at = path("bad.jsonl") + ":2: ";
  expect_refused(good + "{\"text\": \"a\"", at, "JSON");
  // The line is the file's.
  EXPECT_THAT([&] { open("bad.jsonl", good + "{\"text\": \"a\""); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("column 13"), Not(HasSubstr("line 1")))));
  expect_refused(good + "[1]", at, "array");
  expect_refused(good + "{\"text\": 7}", at, "number");
  expect_refused(good + "{\"content\": \"a\"}", at, "\"content\"");
  expect_refused(good + "{\"text\": \"a\", \"prompt\": \"b\"}", at, "\"prompt\"");
  expect_refused(good + "{\"prompt\": \"b\"}", at, "\"prompt\"");
  expect_refused(good + "{\"prompt\": \"a\", \"completion\": \"b\"}", at, path("bad.jsonl") + ":1");
  expect_refused("{\"prompt\": \"\", \"completion\": \"b\"}", path("bad.jsonl") + ":1: ", "prompt");
  expect_refused("{\"prompt\": \"a\", \"completion\": \"\"}",
                 path("bad.jsonl") + ":1: ", "completion");
  // With an end of text there is something to learn.
  EXPECT_EQ(
      open("a.jsonl", "{\"prompt\": \"a\", \"completion\": \"\"}", with_end()).examples().size(),
      1U);
  EXPECT_THROW(open("empty.jsonl", "\n"), ConfigError);
}

TEST_F(JsonLinesTest, OneKindOfFileAndOfRecord) {
  std::filesystem::create_directory(path("f"));
  test::write_file(path("f/a.jsonl"), "{\"text\": \"a\"}\n");
  test::write_file(path("f/b.txt"), "text");
  for (const bool opens : {true, false}) {
    EXPECT_THAT(
        [&] { opens ? void(Corpus::open(path("f"), Tokenizer::bytes())) : check_files(path("f")); },
        ThrowsMessage<ConfigError>(
            AllOf(HasSubstr(path("f/a.jsonl")), HasSubstr(path("f/b.txt")))));
  }
  test::write_file(path("c.jsonl"), "{\"prompt\": \"a\", \"completion\": \"b\"}\n");
  const std::string both = path("f/a.jsonl") + "," + path("c.jsonl");
  EXPECT_THAT([&] { check_files(both); },
              ThrowsMessage<ConfigError>(
                  AllOf(HasSubstr(path("f/a.jsonl") + ":1"), HasSubstr(path("c.jsonl") + ":1"))));
  EXPECT_NO_THROW(check_files(path("c.jsonl")));
}

}  // namespace
}  // namespace lockstep::data
