// SPDX-License-Identifier: Apache-2.0
// A few steps over shards against the same steps on a whole model.
#pragma once

#include <gtest/gtest.h>

#include "tests/parallel/shard/support.h"
#include "tests/parallel/shard/training.h"

namespace lockstep::test {

constexpr int kFew = 5;  // steps

template <class Task>
void expect_follows(int ranks, const parallel::FullyShardOptions& options, double within = 1e-6,
                    Optimizer kind = Optimizer::sgd) {
  const ShardCurve expected = train_whole<Task>(2 * ranks, kind, kFew);
  comm::run_threads(ranks, [&](const comm::Group& group) {
    const ShardCurve actual =
        train_sharded<Task>(mesh::Mesh::linear(group, "dp"), 2 * ranks, kind, options, kFew);
    for (size_t i = 0; i < expected.losses.size(); ++i) {
      EXPECT_NEAR(actual.losses[i], expected.losses[i], 1e-5 * expected.losses[i]);
      EXPECT_NEAR(actual.norms[i], expected.norms[i], 1e-5 * expected.norms[i]);
    }
    ASSERT_EQ(actual.weights.size(), expected.weights.size());
    for (size_t i = 0; i < expected.weights.size(); ++i)
      EXPECT_LT(distance(actual.weights[i], expected.weights[i]), within) << "parameter " << i;
  });
}

}  // namespace lockstep::test
