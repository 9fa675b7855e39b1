// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/entropy.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <vector>

#include "lockstep/core/philox.h"
#include "lockstep/data/tokens/token_file.h"
#include "tests/support/subprocess.h"

namespace lockstep::data {
namespace {

using test::TempDir;

class EntropyTest : public testing::Test {
 protected:
  Corpus corpus(const std::vector<int32_t>& tokens, int64_t width = 2) const {
    TokenFileWriter writer(dir_.path() + "/x.bin", TokenLayout::llmc, width);
    writer.write(tokens);
    writer.finish();
    return Corpus::open(dir_.path() + "/x.bin", Tokenizer::bytes());
  }

  TempDir dir_;
};

// Straight from the definition.
Entropy reference(const std::vector<int32_t>& tokens) {
  std::map<int32_t, double> first, second;
  std::map<std::pair<int32_t, int32_t>, double> pairs;
  const auto total = static_cast<double>(tokens.size() - 1);
  for (size_t i = 1; i < tokens.size(); ++i) {
    ++first[tokens[i - 1]];
    ++second[tokens[i]];
    ++pairs[{tokens[i - 1], tokens[i]}];
  }
  Entropy result{0, 0, static_cast<int64_t>(tokens.size())};
  for (const auto& [token, n] : second) result.unigram -= n / total * std::log(n / total);
  for (const auto& [pair, n] : pairs) {
    result.bigram -= n / total * std::log(n / first[pair.first]);
  }
  return result;
}

std::vector<int32_t> random_tokens(size_t count, uint64_t vocab) {
  std::vector<int32_t> tokens(count);
  const RandomKey key = random_key(1, "test", "tokens");
  for (size_t i = 0; i < count; ++i) {
    // Some structure: half of the tokens follow from the one before.
    const auto fresh = static_cast<int32_t>(uniform_below(key, i, vocab));
    tokens[i] = i > 0 && fresh % 2 == 0
                    ? static_cast<int32_t>((tokens[i - 1] * 31 + 7) % static_cast<int32_t>(vocab))
                    : fresh;
  }
  return tokens;
}

TEST_F(EntropyTest, AgreesWithTheDefinition) {
  for (const uint64_t vocab : {2, 100, 256, 257, 3000, 65536}) {
    const auto tokens = random_tokens(150'000, vocab);  // more than one read
    const auto found = entropy(corpus(tokens));
    ASSERT_TRUE(found) << vocab;
    const Entropy expected = reference(tokens);
    EXPECT_NEAR(found->unigram, expected.unigram, 1e-9) << vocab;
    EXPECT_NEAR(found->bigram, expected.bigram, 1e-9) << vocab;
    EXPECT_EQ(found->tokens, 150'000);
    EXPECT_LT(found->bigram, found->unigram);
  }
}

TEST_F(EntropyTest, PredictableTokensHaveNoEntropy) {
  const auto constant = entropy(corpus(std::vector<int32_t>(100, 9)));
  EXPECT_EQ(constant->unigram, 0);
  EXPECT_EQ(constant->bigram, 0);
  std::vector<int32_t> alternating;
  for (int i = 0; i < 101; ++i) alternating.push_back(i % 2 * 1000);
  const auto two = entropy(corpus(alternating));
  EXPECT_NEAR(two->unigram, std::log(2), 1e-12);
  EXPECT_NEAR(two->bigram, 0, 1e-12);
}

TEST_F(EntropyTest, Limits) {
  EXPECT_FALSE(entropy(corpus({1})));
  EXPECT_FALSE(entropy(corpus({1, 65536, 2}, 4)));
  const auto tokens = random_tokens(1000, 300);
  const auto some = entropy(corpus(tokens), 400);
  ASSERT_TRUE(some);
  EXPECT_EQ(some->tokens, 400);
  EXPECT_NEAR(some->bigram, reference({tokens.begin(), tokens.begin() + 400}).bigram, 1e-9);
  EXPECT_FALSE(entropy(corpus(tokens), 0));
}

}  // namespace
}  // namespace lockstep::data
