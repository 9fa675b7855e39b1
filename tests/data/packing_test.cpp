// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/packing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <set>

#include "lockstep/core/error.h"
#include "lockstep/data/batch_reader.h"
#include "lockstep/data/tokens/token_file.h"
#include "tests/support/subprocess.h"

namespace lockstep::data {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::ThrowsMessage;

std::vector<Example> documents_of(const std::vector<int64_t>& lengths) {
  std::vector<Example> found;
  int64_t begin = 0;
  for (const int64_t length : lengths) {
    found.push_back({begin, begin + 1, begin + length});
    begin += length;
  }
  return found;
}

std::vector<int64_t> lognormal(size_t count, double median, double sigma) {
  std::mt19937_64 random(7);
  std::normal_distribution<double> normal;
  std::vector<int64_t> lengths;
  for (size_t i = 0; i < count; ++i)
    lengths.push_back(2 + static_cast<int64_t>(median * std::exp(sigma * normal(random))));
  return lengths;
}

TEST(Packing, FillsRowsWithDocumentsOfLognormalLength) {
  for (const int64_t seq_len : {256, 1024, 4096}) {
    for (const double sigma : {0.5, 1.0, 1.5}) {
      const auto lengths = lognormal(4000, static_cast<double>(seq_len) / 5, sigma);
      const Packing packing(documents_of(lengths), seq_len, /*continues=*/true);
      int64_t inputs = 0;
      for (const int64_t length : lengths) inputs += length - 1;
      EXPECT_EQ(packing.used(), inputs);
      EXPECT_GE(static_cast<double>(packing.used()),
                0.97 * static_cast<double>(packing.rows() * seq_len))
          << seq_len << " " << sigma;
    }
  }
}

TEST(Packing, HasEveryDocumentOnceAndCutsOnlyWhatIsTooLong) {
  const auto lengths = lognormal(500, 30, 1);
  const auto documents = documents_of(lengths);
  const Packing packing(documents, 64, /*continues=*/true);
  std::map<int64_t, int64_t> counts;  // by begin
  for (int64_t row = 0; row < packing.rows(); ++row) {
    int64_t sum = 0;
    for (const PackedPiece& piece : packing.row(row)) {
      sum += piece.count;
      EXPECT_TRUE(counts.emplace(piece.begin, piece.count).second);
    }
    EXPECT_LE(sum, 64);
    EXPECT_GT(sum, 0);
  }
  for (const Example& each : documents) {
    // Pieces follow each other, all but the last as long as a row.
    for (int64_t at = each.begin; at < each.end - 1; at += 64) {
      ASSERT_TRUE(counts.contains(at));
      EXPECT_EQ(counts[at], std::min<int64_t>(each.end - 1 - at, 64));
      counts.erase(at);
    }
  }
  EXPECT_TRUE(counts.empty());
}

TEST(Packing, TakesTheFirstRowThatHasRoom) {
  const Packing packing(documents_of({4, 9, 6, 3, 5, 2, 11}), 8, /*continues=*/false);
  std::vector<std::vector<int64_t>> counts;
  for (int64_t row = 0; row < packing.rows(); ++row) {
    counts.emplace_back();
    for (const PackedPiece& piece : packing.row(row)) counts.back().push_back(piece.count);
  }
  // Of 3, 8, 5, 2, 4, 1 and 10, of which the last is cut.
  EXPECT_THAT(counts,
              ElementsAre(ElementsAre(8), ElementsAre(8), ElementsAre(5, 3), ElementsAre(4, 2, 1)));
}

class PackedCorpus : public testing::Test {
 protected:
  std::string path(const std::string& name) const { return dir_.path() + "/" + name; }
  Corpus written(const std::string& name, TokenLayout layout,
                 const std::vector<std::vector<int32_t>>& documents) const {
    TokenFileWriter writer(path(name), layout, 2);
    for (const auto& document : documents) {
      writer.write(document);
      writer.end_document();
    }
    writer.finish();
    return Corpus::open(path(name), Tokenizer::bytes());
  }
  Corpus text(const std::string& name, const std::string& content) const {
    test::write_file(path(name), content);
    return Corpus::open(path(name), Tokenizer::bytes());
  }
  static std::vector<std::pair<int64_t, int64_t>> borders(const Corpus& corpus) {
    std::vector<std::pair<int64_t, int64_t>> found;
    for (const Example& each : corpus.examples()) {
      EXPECT_EQ(each.unanswered(), 0);
      found.emplace_back(each.begin, each.end);
    }
    return found;
  }
  test::TempDir dir_;
};

TEST_F(PackedCorpus, FindsTheDocumentsOfAllKindsOfData) {
  using Borders = std::vector<std::pair<int64_t, int64_t>>;
  const std::vector<std::vector<int32_t>> documents{{1, 2, 99}, {3, 99}, {4, 5, 6, 7}, {8}};
  EXPECT_EQ(borders(written("m.bin", TokenLayout::megatron, documents).documents({})),
            (Borders{{0, 3}, {3, 5}, {5, 9}}));  // one of a single token has no target
  EXPECT_EQ(borders(written("l.bin", TokenLayout::llmc, documents).documents(99)),
            (Borders{{0, 3}, {3, 5}, {5, 10}}));
  const Corpus raw = written("n.bin", TokenLayout::nanogpt, documents);
  EXPECT_EQ(borders(raw.documents(99)), (Borders{{0, 3}, {3, 5}, {5, 10}}));
  // Where nothing says where documents end, that is said.
  EXPECT_THAT([&] { raw.documents({}); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("n.bin"), HasSubstr("data.tokenizer"))));
  EXPECT_THAT([&] { raw.documents(98); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("n.bin"), HasSubstr("98"))));
  EXPECT_EQ(borders(text("a.jsonl", "{\"text\":\"abc\"}\n{\"text\":\"\"}\n{\"text\":\"de\"}\n")
                        .documents({})),
            (Borders{{0, 3}, {3, 5}}));
  test::write_file(path("b.txt"), "0123");
  test::write_file(path("c.txt"), "456");
  const Corpus files = Corpus::open(path("b.txt") + "," + path("c.txt"), Tokenizer::bytes());
  EXPECT_EQ(borders(files.documents({})), (Borders{{0, 4}, {4, 7}}));
  // Examples are what they were.
  const Corpus tuned = text("d.jsonl", "{\"prompt\":\"ab\",\"completion\":\"cd\"}\n");
  EXPECT_EQ(tuned.documents({}).examples()[0], tuned.examples()[0]);
  EXPECT_FALSE(tuned.documents({}).has_documents());
  EXPECT_THROW(files.packed(4), ConfigError);
  // Documents are compared where both are read as such.
  EXPECT_NE(files.documents({}).identity().documents, 0U);
  EXPECT_EQ(files.documents({}).identity(), files.identity());
  // The end of documents is held out, not of one of them.
  const auto [train, validation] = hold_out(files.documents({}), 0.5);
  EXPECT_EQ(borders(train), (Borders{{0, 4}}));
  EXPECT_EQ(borders(validation), (Borders{{0, 3}}));
}

TEST_F(PackedCorpus, RowsRestartPositionsAndPredictNoOtherDocument) {
  const Corpus corpus =
      text("a.jsonl",
           "{\"prompt\":\"ab\",\"completion\":\"cd\"}\n{\"prompt\":\"x\",\"completion\":\"y\"}\n")
          .packed(6);
  EXPECT_EQ(sample_count(corpus, 6), 1);
  EXPECT_THROW(sample_count(corpus, 5), ConfigError);
  const Batch batch =
      evaluation_batch(corpus, {.seq_len = 6, .vocab = 256, .first_window = 0, .rows = 2});
  const int64_t none = kIgnoredTarget;
  EXPECT_THAT(batch.input, ElementsAre('a', 'b', 'c', 'x', 0, 0, 0, 0, 0, 0, 0, 0));
  EXPECT_THAT(batch.target,
              ElementsAre(none, 'c', 'd', 'y', none, none, none, none, none, none, none, none));
  EXPECT_THAT(batch.positions, ElementsAre(0, 1, 2, 0, 0, 1, 0, 1, 2, 3, 4, 5));
  EXPECT_EQ(sample_size(corpus, 0, 6).targets, 3);
  EXPECT_EQ(sample_size(corpus, 0, 6).inputs, 4);
}

// However a step is cut and wherever a run resumes: the same rows, each document once an epoch.
TEST_F(PackedCorpus, AnEpochHasEveryDocumentOnceOnAnyNumberOfRanks) {
  std::vector<std::vector<int32_t>> documents;
  for (const int64_t length : lognormal(60, 6, 1)) {
    documents.emplace_back();
    for (int64_t i = 0; i < length; ++i)
      documents.back().push_back(static_cast<int32_t>(1 + documents.size()));
  }
  constexpr int64_t kSeqLen = 32;
  const Corpus corpus =
      written("m.bin", TokenLayout::megatron, documents).documents({}).packed(kSeqLen);
  const int64_t rows = sample_count(corpus, kSeqLen), step = 4, steps = rows / step;
  const auto read = [&](int64_t dp, int64_t micro_batch, int64_t first) {
    std::vector<int64_t> tokens;
    std::vector<BatchReader> ranks;
    for (int64_t rank = 0; rank < dp; ++rank)
      ranks.emplace_back(corpus, BatchPlan{.seq_len = kSeqLen,
                                           .micro_batch = micro_batch,
                                           .accumulation = step / dp / micro_batch,
                                           .dp = dp,
                                           .dp_rank = rank,
                                           .seed = 3,
                                           .vocab = 100,
                                           .first_sample = first});
    for (int64_t i = first; i < steps * step; i += step) {
      int64_t targets = 0, expected = 0;
      for (BatchReader& rank : ranks) {
        for (int64_t j = 0; j < step / dp / micro_batch; ++j) {
          const Batch batch = rank.next();
          expected = batch.step_targets;
          for (size_t at = 0; at < batch.input.size(); ++at) {
            tokens.push_back(batch.input[at]);
            tokens.push_back(batch.positions[at]);
            // Documents have a token of their own, so a target is that of its input or none.
            if (batch.target[at] == kIgnoredTarget) continue;
            EXPECT_EQ(batch.target[at], batch.input[at]);
            ++targets;
          }
        }
      }
      EXPECT_EQ(targets, expected);
    }
    return tokens;
  };
  const auto alone = read(1, 4, 0);
  EXPECT_EQ(read(2, 1, 0), alone);
  EXPECT_EQ(read(4, 1, 0), alone);
  const auto resumed = read(2, 2, step);
  EXPECT_TRUE(std::equal(resumed.begin(), resumed.end(),
                         alone.end() - static_cast<int64_t>(resumed.size())));
  std::map<int64_t, int64_t> counts;
  for (size_t at = 0; at < alone.size(); at += 2) ++counts[alone[at]];
  counts.erase(0);
  int64_t whole = 0;
  for (const auto& [token, count] : counts)
    whole += count == static_cast<int64_t>(documents[static_cast<size_t>(token - 2)].size()) - 1;
  // At most the rows that no full step has are missing.
  EXPECT_GT(whole, 50);
}

}  // namespace
}  // namespace lockstep::data
