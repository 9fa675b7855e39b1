// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/batch_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/data/sampler.h"
#include "lockstep/data/tokens/token_file.h"
#include "tests/support/says.h"
#include "tests/support/subprocess.h"

namespace lockstep::data {
namespace {

using test::says;
using test::TempDir;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr int64_t kSeqLen = 4, kVocab = 1000;

class BatchReaderTest : public testing::Test {
 protected:
  // Token i is i, in shards of 100, so that samples lie over borders.
  Corpus corpus(int32_t size = 401) const {
    std::string list;
    for (int32_t begin = 0; begin < size; begin += 100) {
      const std::string path = dir_.path() + "/" + std::to_string(begin) + ".bin";
      TokenFileWriter writer(path, TokenLayout::llmc, 2);
      for (int32_t token = begin; token < std::min(begin + 100, size); ++token) {
        writer.write(std::span(&token, 1));
      }
      writer.finish();
      list += (list.empty() ? "" : ",") + path;
    }
    return Corpus::open(list, Tokenizer::bytes());
  }

  TempDir dir_;
};

BatchPlan plan_with(int64_t micro_batch, int64_t accumulation, int64_t dp, int64_t dp_rank = 0) {
  return {.seq_len = kSeqLen,
          .micro_batch = micro_batch,
          .accumulation = accumulation,
          .dp = dp,
          .dp_rank = dp_rank,
          .seed = 5,
          .vocab = kVocab};
}

// The samples in a batch, by the first token of each row; checks the rows.
std::vector<int64_t> samples_in(const Batch& batch) {
  std::vector<int64_t> samples;
  EXPECT_EQ(batch.input.size(), static_cast<size_t>(batch.rows * kSeqLen));
  EXPECT_EQ(batch.target.size(), batch.input.size());
  for (size_t i = 0; i < batch.input.size(); ++i) {
    if (i % kSeqLen == 0) {
      EXPECT_EQ(batch.input[i] % kSeqLen, 0);
      samples.push_back(batch.input[i] / kSeqLen);
    } else {
      EXPECT_EQ(batch.input[i], batch.input[i - 1] + 1);
    }
    EXPECT_EQ(batch.target[i], batch.input[i] + 1);
  }
  return samples;
}

bool is_padding(const Batch& batch) {
  return std::ranges::all_of(batch.target, [](int64_t target) { return target == kIgnoredTarget; });
}

// What all ranks together read in a step, in global order.
std::vector<int64_t> steps_of(const Corpus& corpus, BatchPlan plan, int64_t steps) {
  std::vector<BatchReader> ranks;
  for (plan.dp_rank = 0; plan.dp_rank < plan.dp; ++plan.dp_rank) {
    ranks.emplace_back(corpus, plan, 2);
  }
  std::vector<int64_t> samples;
  for (int64_t step = 0; step < steps; ++step) {
    for (BatchReader& rank : ranks) {
      for (int64_t j = 0; j < plan.accumulation; ++j) {
        const Batch batch = rank.next();
        EXPECT_EQ(batch.rows, plan.micro_batch);
        EXPECT_EQ(batch.step_targets, plan.global_batch() * kSeqLen);
        if (plan.step_rows > 0 && is_padding(batch)) continue;
        const auto more = samples_in(batch);
        samples.insert(samples.end(), more.begin(), more.end());
      }
    }
  }
  return samples;
}

TEST_F(BatchReaderTest, FollowsTheSampler) {
  const auto data = corpus();
  const Sampler sampler(window_count(data.size(), kSeqLen), 5);
  ASSERT_EQ(sampler.samples(), 100);
  BatchReader reader(data, plan_with(3, 1, 1));
  EXPECT_EQ(reader.samples(), 100);
  for (int64_t index = 0; index < 300;) {  // three epochs
    for (const int64_t sample : samples_in(reader.next())) ASSERT_EQ(sample, sampler(index++));
  }
}

TEST_F(BatchReaderTest, AStepIsTheSameHoweverItIsCut) {
  const auto data = corpus();
  constexpr int64_t kSteps = 20;  // 240 samples: over two borders of epochs
  const auto expected = steps_of(data, plan_with(12, 1, 1), kSteps);
  ASSERT_EQ(expected.size(), 240u);
  const std::array<int64_t, 3> cuts[] = {{1, 12, 1}, {4, 3, 1}, {6, 1, 2}, {2, 3, 2},
                                         {4, 1, 3},  {1, 4, 3}, {3, 1, 4}, {1, 3, 4}};
  for (const auto& [micro_batch, accumulation, dp] : cuts) {
    EXPECT_EQ(steps_of(data, plan_with(micro_batch, accumulation, dp), kSteps), expected)
        << micro_batch << " x " << accumulation << " x " << dp;
  }
}

// Ranks without a micro-batch in a step read padding: every sample comes once.
TEST_F(BatchReaderTest, RanksMayHaveFewerMicroBatches) {
  const auto data = corpus();
  const auto expected = steps_of(data, plan_with(12, 1, 1), 20);
  const std::array<int64_t, 3> cuts[] = {{2, 2, 4}, {3, 2, 3}, {4, 2, 2}, {1, 3, 5}, {1, 5, 4}};
  for (const auto& [micro_batch, accumulation, dp] : cuts) {
    BatchPlan plan = plan_with(micro_batch, accumulation, dp);
    plan.step_rows = 12;
    EXPECT_EQ(steps_of(data, plan, 20), expected) << micro_batch << " x " << dp;
  }
}

// At any step, and with another batch size from there on.
TEST_F(BatchReaderTest, ResumesAtAnySample) {
  const auto data = corpus();
  const auto whole = steps_of(data, plan_with(1, 1, 1), 260);
  for (int64_t first = 0; first < 130; first += 7) {
    auto plan = plan_with(2, 2, 3);
    plan.first_sample = first;
    const auto begin = whole.begin() + static_cast<ptrdiff_t>(first);
    EXPECT_EQ(steps_of(data, plan, 10), std::vector<int64_t>(begin, begin + 120)) << first;
  }
}

TEST_F(BatchReaderTest, DepthChangesNothing) {
  const auto data = corpus();
  BatchReader one(data, plan_with(2, 2, 1), 1), many(data, plan_with(2, 2, 1), 64);
  for (int i = 0; i < 200; ++i) ASSERT_EQ(one.next().input, many.next().input);
}

// In every state: nothing read, all slots full, moved from, mid-stream.
TEST_F(BatchReaderTest, CanBeDestroyedInAnyState) {
  const auto data = corpus();
  for (int i = 0; i < 200; ++i) {
    BatchReader reader(data, plan_with(2, 1, 1), 1 + i % 3);
    for (int k = 0; k < i % 5; ++k) reader.next();
    if (i % 4 == 0) {
      BatchReader moved = std::move(reader);
      moved.next();
    }
  }
  // A batch that takes long: two million rows.
  const BatchReader busy(data, plan_with(200'000, 1, 1), 1);
}

TEST_F(BatchReaderTest, IdsOutsideTheVocabularySurface) {
  const auto data = corpus();
  auto plan = plan_with(1, 1, 1);
  plan.vocab = 350;
  BatchReader reader(data, plan);
  int good = 0;
  const auto read_all = [&] {
    while (true) {
      for (const int64_t sample : samples_in(reader.next())) {
        EXPECT_LT(sample * kSeqLen + kSeqLen, 350);
      }
      ++good;
    }
  };
  const char* facts = "outside ... vocabulary of 350";
  EXPECT_THAT(read_all, ThrowsMessage<ConfigError>(says(facts)));
  // All that was before the wrong one has come, and the failure stays.
  const Sampler sampler(100, 5);
  int expected = 0;
  while (sampler(expected) * kSeqLen + kSeqLen < 350) ++expected;
  EXPECT_EQ(good, expected);
  EXPECT_THAT([&] { reader.next(); }, ThrowsMessage<ConfigError>(says(facts)));
}

TEST_F(BatchReaderTest, RejectsBadPlans) {
  const auto data = corpus();
  const auto refused = [&](auto change, const char* rule, int64_t depth = 1) {
    auto plan = plan_with(1, 1, 2, 1);
    change(plan);
    EXPECT_THAT([&] { BatchReader(data, plan, depth); }, ThrowsMessage<ConfigError>(says(rule)));
  };
  refused([](auto& plan) { plan.seq_len = 0; }, "seq_len is 0 ... at least 1");
  refused([](auto& plan) { plan.micro_batch = 0; }, "micro_batch is 0");
  refused([](auto& plan) { plan.accumulation = -1; }, "accumulation is -1");
  refused([](auto& plan) { plan.dp = 0; }, "dp is 0");
  refused([](auto& plan) { plan.vocab = 0; }, "vocab is 0");
  refused([](auto&) {}, "depth is 0", 0);
  refused([](auto& plan) { plan.dp_rank = 2; }, "dp_rank is 2, must be in [0, 2)");
  refused([](auto& plan) { plan.dp_rank = -1; }, "dp_rank is -1");
  refused([](auto& plan) { plan.first_sample = -1; }, "first_sample is -1");
  refused([](auto& plan) { plan.step_rows = 3; },
          "step_rows is 3 ... multiple of micro_batch 1 ... accumulation 1 x dp 2 = 2");
  refused([](auto& plan) { plan.micro_batch = 2, plan.step_rows = 3; }, "step_rows is 3");
  refused([](auto& plan) { plan.step_rows = -1; }, "step_rows is -1");
  refused([](auto& plan) { plan.seq_len = 401; },
          "the data has 401 tokens, one sample needs seq_len + 1 = 402");
  auto longest = plan_with(1, 1, 1);
  longest.seq_len = 400;
  EXPECT_EQ(BatchReader(data, longest).samples(), 1);
}

}  // namespace
}  // namespace lockstep::data
