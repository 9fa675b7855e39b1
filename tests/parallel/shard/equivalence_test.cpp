// SPDX-License-Identifier: Apache-2.0
// Every way to shard follows the one process that runs the same micro-batches.
#include <gtest/gtest.h>
#include <torch/types.h>

#include <cmath>
#include <mutex>
#include <optional>

#include "lockstep/comm/group.h"
#include "tests/parallel/shard/training.h"

namespace lockstep::test {
namespace {

using parallel::FullyShardOptions;
using Strategy = parallel::ShardingStrategy;

int shard_micro_batches_for(int ranks) { return ranks == 3 ? 6 : 8; }

double relative(double a, double b) { return std::abs(a - b) / std::max(std::abs(b), 1e-12); }

void expect_same_curve(const ShardCurve& actual, const ShardCurve& expected) {
  ASSERT_EQ(actual.losses.size(), expected.losses.size());
  for (size_t i = 0; i < expected.losses.size(); ++i) {
    EXPECT_LT(relative(actual.losses[i], expected.losses[i]), 1e-5) << "loss of step " << i;
    EXPECT_LT(relative(actual.norms[i], expected.norms[i]), 1e-5) << "norm of step " << i;
  }
}

void expect_same_weights(const ShardCurve& actual, const ShardCurve& expected, double within) {
  ASSERT_EQ(actual.weights.size(), expected.weights.size());
  for (size_t i = 0; i < expected.weights.size(); ++i) {
    const double difference = (actual.weights[i] - expected.weights[i]).abs().max().item<double>();
    EXPECT_LT(difference, within) << "parameter " << i;
  }
}

// On thread ranks; returns rank 0's curve. All ranks must have the same.
template <class Task>
ShardCurve on_ranks(int ranks, Optimizer kind, const FullyShardOptions& options) {
  const int micro_batches = shard_micro_batches_for(ranks);
  std::mutex mutex;
  std::vector<ShardCurve> curves(static_cast<size_t>(ranks));
  comm::run_threads(ranks, [&](comm::Group group) {
    mesh::Mesh mesh = mesh::Mesh::linear(group, "dp");
    if (options.strategy == Strategy::hybrid_shard) {
      const int inner = ranks % 2 == 0 ? ranks / 2 : 1;
      mesh = mesh::Mesh(group, {{"replicate", ranks / inner}, {"shard", inner}});
    }
    ShardCurve curve = train_sharded<Task>(mesh, micro_batches, kind, options);
    const std::lock_guard lock(mutex);
    curves[static_cast<size_t>(group.rank())] = std::move(curve);
  });
  for (const ShardCurve& curve : curves) {
    EXPECT_EQ(curve.losses, curves[0].losses);
    EXPECT_EQ(curve.norms, curves[0].norms);
  }
  return curves[0];
}

struct Case {
  std::string name;
  FullyShardOptions options;
};

std::vector<Case> strategies() {
  const auto with = [](Strategy strategy, bool orig) {
    return FullyShardOptions{.strategy = strategy, .min_num_params = 100, .use_orig_params = orig};
  };
  const auto by_tensors = [](FullyShardOptions options) {
    options.advanced.granularity = parallel::ShardGranularity::tensors;
    return options;
  };
  return {{"full", with(Strategy::full_shard, false)},
          {"full_orig", with(Strategy::full_shard, true)},
          {"grad_op", with(Strategy::shard_grad_op, false)},
          {"optimizer", with(Strategy::optimizer, false)},
          {"none", with(Strategy::no_shard, false)},
          {"hybrid", with(Strategy::hybrid_shard, true)},
          {"optimizer_tensors", by_tensors(with(Strategy::optimizer, true))}};
}

class Strategies : public ::testing::TestWithParam<int> {};

// `within`: weights of one strategy against another; `alone`: against one process.
template <class Task>
void expect_equivalence(int ranks, Optimizer kind, double within, double alone) {
  const ShardCurve expected = train_whole<Task>(shard_micro_batches_for(ranks), kind);
  std::optional<ShardCurve> first;
  for (const auto& [name, options] : strategies()) {
    SCOPED_TRACE(name);
    const ShardCurve actual = on_ranks<Task>(ranks, kind, options);
    expect_same_curve(actual, expected);
    expect_same_weights(actual, expected, alone);
    if (!first) first = actual;
    expect_same_weights(actual, *first, within);
  }
}

TEST_P(Strategies, FollowOneProcessWithSgd) {
  expect_equivalence<TransformerTask>(GetParam(), Optimizer::sgd, 1e-6, 1e-6);
}

// Gradients that are zero but for rounding (of key biases) become full steps, whose signs depend on
// how micro-batches are summed.
TEST_P(Strategies, FollowOneProcessWithAdamW) {
  expect_equivalence<TiedTransformerTask>(GetParam(), Optimizer::adamw, 1e-4, 5e-4);
}

INSTANTIATE_TEST_SUITE_P(Ranks, Strategies, ::testing::Values(1, 2, 3, 4, 8));

TEST(Reproducible, TheSameBitsOnOneTwoAndFourRanks) {
  for (const auto& [name, given] : strategies()) {
    SCOPED_TRACE(name);
    FullyShardOptions options = given;
    options.reproducible = true;
    const ShardCurve one = on_ranks<TransformerTask>(1, Optimizer::adamw, options);
    for (const int ranks : {2, 4}) {
      const ShardCurve many = on_ranks<TransformerTask>(ranks, Optimizer::adamw, options);
      EXPECT_EQ(many.norms, one.norms) << ranks << " ranks";
      for (size_t i = 0; i < one.weights.size(); ++i)
        EXPECT_TRUE(torch::equal(many.weights[i], one.weights[i])) << ranks << " ranks, " << i;
    }
  }
}

}  // namespace
}  // namespace lockstep::test
