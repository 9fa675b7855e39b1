// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/batch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/core/error.h"
#include "tests/support/says.h"
#include "tests/support/subprocess.h"

namespace lockstep::data {
namespace {

using test::says;
using test::TempDir;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::ThrowsMessage;

class BatchTest : public testing::Test {
 protected:
  // Token i is i + 1.
  Corpus corpus(int64_t size) const {
    std::string text;
    for (int64_t i = 1; i <= size; ++i) text += static_cast<char>(i);
    test::write_file(dir_.path() + "/x", text);
    return Corpus::open(dir_.path() + "/x", Tokenizer::bytes());
  }

  TempDir dir_;
};

TEST_F(BatchTest, TargetsAreTheNextTokens) {
  Batch batch;
  batch.add(corpus(9), {.begin = 2, .count = 3, .seq_len = 3, .vocab = 256});
  batch.add(corpus(9), {.begin = 7, .count = 1, .seq_len = 3, .vocab = 256});
  EXPECT_EQ(batch.rows, 2);
  EXPECT_THAT(batch.input, ElementsAre(3, 4, 5, 8, 0, 0));
  EXPECT_THAT(batch.target, ElementsAre(4, 5, 6, 9, -100, -100));
}

TEST_F(BatchTest, EvaluationPredictsEachTokenOnce) {
  for (int64_t size = 1; size < 30; ++size) {
    const auto data = corpus(size);
    for (int64_t seq_len = 1; seq_len < 8; ++seq_len) {
      const int64_t windows = evaluation_windows(size, seq_len);
      int64_t expected = 2;
      for (int64_t first = 0; first < windows; first += 2) {
        const Batch batch = evaluation_batch(
            data, {.seq_len = seq_len, .vocab = 256, .first_window = first, .rows = 2});
        ASSERT_EQ(batch.rows, 2);
        ASSERT_EQ(batch.input.size(), static_cast<size_t>(2 * seq_len));
        ASSERT_EQ(batch.target.size(), batch.input.size());
        for (size_t i = 0; i < batch.target.size(); ++i) {
          if (batch.target[i] == kIgnoredTarget) continue;
          ASSERT_EQ(batch.target[i], expected++);
          ASSERT_EQ(batch.input[i], batch.target[i] - 1);
        }
      }
      ASSERT_EQ(expected, size + 1) << size << " tokens, windows of " << seq_len;
    }
  }
}

TEST_F(BatchTest, BeyondTheDataIsPadding) {
  const Batch batch =
      evaluation_batch(corpus(5), {.seq_len = 3, .vocab = 6, .first_window = 1, .rows = 3});
  EXPECT_THAT(batch.input, ElementsAre(4, 0, 0, 0, 0, 0, 0, 0, 0));
  EXPECT_THAT(batch.target, ElementsAre(5, -100, -100, -100, -100, -100, -100, -100, -100));
}

TEST_F(BatchTest, RejectsBadWindowsAndTokens) {
  const auto data = corpus(5);
  // The last token is only ever a target.
  EXPECT_THAT(
      [&] { evaluation_batch(data, {.seq_len = 4, .vocab = 5, .first_window = 0, .rows = 1}); },
      ThrowsMessage<ConfigError>(
          says("token 5 at position 4 ... (" + dir_.path() + "/x, token 4) ... vocabulary of 5")));
  EXPECT_THROW(evaluation_batch(data, {.seq_len = 0, .vocab = 5, .rows = 1}), ConfigError);
  EXPECT_THROW(evaluation_batch(data, {.seq_len = 1, .vocab = 9, .first_window = -1, .rows = 1}),
               ConfigError);
  EXPECT_THROW(evaluation_windows(5, 0), ConfigError);
}

}  // namespace
}  // namespace lockstep::data
