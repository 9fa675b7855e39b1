// SPDX-License-Identifier: Apache-2.0
// Which samples ranks take: each once in an epoch, in an order that any number of ranks shares.
#include "lockstep/parallel/data/distributed_sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/data/dataloader.h>
#include <torch/data/datasets/base.h>
#include <torch/serialize.h>

#include <algorithm>
#include <numeric>
#include <sstream>

#include "lockstep/core/error.h"

namespace lockstep::test {
namespace {

using data::DistributedSampler;
using data::DistributedSamplerOptions;
using data::SamplerPosition;
using Samples = std::vector<size_t>;

Samples pass_of(DistributedSampler& sampler, size_t batch) {
  Samples all;
  while (const auto some = sampler.next(batch)) all.insert(all.end(), some->begin(), some->end());
  return all;
}

// Batch by batch, what all ranks take in some epochs, rank after rank.
std::vector<Samples> batches_of(int ranks, size_t batch, int epochs,
                                const DistributedSamplerOptions& options, int64_t size = 24,
                                SamplerPosition from = {}) {
  std::vector<std::vector<Samples>> taken(static_cast<size_t>(ranks));
  comm::run_threads(ranks, [&](const comm::Group& group) {
    DistributedSampler sampler(size, group, options);
    sampler.set_position(from);
    for (int epoch = 0; epoch < epochs; ++epoch) {
      sampler.reset();
      while (const auto some = sampler.next(batch))
        taken[static_cast<size_t>(group.rank())].push_back(*some);
    }
  });
  std::vector<Samples> all;
  for (size_t b = 0; b < taken[0].size(); ++b) {
    all.emplace_back();
    for (const auto& mine : taken) {
      EXPECT_EQ(mine.size(), taken[0].size());
      EXPECT_EQ(mine[b].size(), taken[0][b].size());
      all.back().insert(all.back().end(), mine[b].begin(), mine[b].end());
    }
  }
  return all;
}

Samples joined(const std::vector<Samples>& batches, size_t begin, size_t end) {
  Samples all;
  for (size_t b = begin; b < end; ++b) all.insert(all.end(), batches[b].begin(), batches[b].end());
  std::sort(all.begin(), all.end());
  return all;
}

TEST(DistributedSampler, BatchesAreTheSameOnAnyNumberOfRanks) {
  const auto alone = batches_of(1, 12, 3, {.seed = 5});
  ASSERT_EQ(alone.size(), 6U);
  EXPECT_EQ(batches_of(2, 6, 3, {.seed = 5}), alone);
  EXPECT_EQ(batches_of(3, 4, 3, {.seed = 5}), alone);
  Samples every(24);
  std::iota(every.begin(), every.end(), 0);
  for (size_t epoch = 0; epoch < 3; ++epoch)
    EXPECT_EQ(joined(alone, 2 * epoch, 2 * epoch + 2), every) << epoch;
  EXPECT_NE(alone[0], alone[2]) << "every epoch has an order of its own";
  EXPECT_NE(batches_of(1, 12, 3, {.seed = 6}), alone);
  EXPECT_EQ(batches_of(2, 6, 1, {.shuffle = false})[0],
            (Samples{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}));
}

TEST(DistributedSampler, RanksHaveEqualCounts) {
  for (const bool repeat : {false, true}) {
    const auto batches = batches_of(3, 2, 1, {.seed = 1, .repeat = repeat}, 25);
    const Samples all = joined(batches, 0, batches.size());
    EXPECT_EQ(all.size(), repeat ? 27U : 24U);
    Samples once = all;
    once.erase(std::unique(once.begin(), once.end()), once.end());
    EXPECT_EQ(once.size(), repeat ? 25U : 24U);
  }
  EXPECT_THAT([] { DistributedSampler(0, comm::Group(), {.repeat = true}); },
              testing::ThrowsMessage<ConfigError>(testing::HasSubstr("0 samples over 1 ranks")));
  comm::run_threads(2, [](const comm::Group& group) {
    EXPECT_THROW(DistributedSampler(1, group), ConfigError);
    EXPECT_EQ(DistributedSampler(1, group, {.repeat = true}).samples_per_rank(), 1);
  });
}

// From where a run stopped, on another number of ranks.
TEST(DistributedSampler, ContinuesAtAPosition) {
  const auto whole = batches_of(2, 3, 2, {.seed = 2});  // of six samples
  const auto rest = batches_of(1, 6, 1, {.seed = 2}, 24, {.epoch = 1, .taken = 12});
  EXPECT_EQ(rest, (std::vector<Samples>{whole[6], whole[7]}));
  comm::run_threads(2, [](const comm::Group& group) {
    DistributedSampler sampler(24, group, {.seed = 2});
    for (const SamplerPosition wrong :
         {SamplerPosition{0, 3}, SamplerPosition{0, 26}, SamplerPosition{-1, 0}})
      EXPECT_THROW(sampler.set_position(wrong), ConfigError);
    EXPECT_EQ(sampler.position(), SamplerPosition());
    sampler.set_position({.epoch = 3, .taken = 24});
    EXPECT_FALSE(sampler.next(1)) << "the epoch is over";
    sampler.reset();
    EXPECT_EQ(sampler.position(), (SamplerPosition{.epoch = 4}));
  });
}

TEST(DistributedSampler, PositionsAreSaved) {
  DistributedSampler sampler(10, comm::Group(), {.seed = 3});
  pass_of(sampler, 4);
  sampler.reset();
  sampler.next(4);
  std::stringstream file;
  torch::serialize::OutputArchive out;
  sampler.save(out);
  out.save_to(file);
  DistributedSampler other(10, comm::Group(), {.seed = 3});
  torch::serialize::InputArchive in;
  in.load_from(file);
  other.load(in);
  EXPECT_EQ(other.position(), (SamplerPosition{.epoch = 1, .taken = 4}));
  other.reset();  // as a loader begins
  EXPECT_EQ(pass_of(other, 3), pass_of(sampler, 6));
}

// The numbers below a limit.
struct Numbers : torch::data::datasets::Dataset<Numbers, size_t> {
  size_t get(size_t index) override { return index; }
  torch::optional<size_t> size() const override { return 12; }
};

TEST(DistributedSampler, DrivesADataLoader) {
  DistributedSampler expected(12, comm::Group(), {.seed = 4});
  for (const size_t workers : {0, 2}) {
    DistributedSampler sampler(12, comm::Group(), {.seed = 4});
    auto loader = torch::data::make_data_loader(Numbers(), sampler,
                                                torch::data::DataLoaderOptions(5).workers(workers));
    for (const int64_t epoch : {0, 1, 2, 7}) {
      if (epoch == 7) sampler.set_epoch(7);
      expected.set_epoch(epoch);
      Samples taken;
      for (const std::vector<size_t>& batch : *loader)
        taken.insert(taken.end(), batch.begin(), batch.end());
      EXPECT_EQ(taken, pass_of(expected, 5)) << epoch;
    }
  }
}

}  // namespace
}  // namespace lockstep::test
