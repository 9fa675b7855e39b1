// SPDX-License-Identifier: Apache-2.0
// When parameters are gathered: how often, how far ahead, and how many at a time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <algorithm>
#include <set>

#include "tests/parallel/shard/support.h"

namespace lockstep::test {
namespace {

using parallel::FullyShardOptions;
using parallel::ParameterState;
using parallel::Prefetch;
using parallel::ShardedModel;
using parallel::ShardStats;

constexpr int64_t kUnits = 4;

ShardStats operator-(ShardStats after, const ShardStats& before) {
  after.all_gathers -= before.all_gathers;
  after.fetched_ahead -= before.fetched_ahead;
  after.reduce_scatters -= before.reduce_scatters;
  after.all_reduces -= before.all_reduces;
  return after;
}

struct Watched {
  Layers model{kUnits};
  ShardedModel sharded;
  torch::optim::SGD optimizer;

  Watched(const comm::Group& group, const FullyShardOptions& options)
      : sharded(parallel::fully_shard(*model, group, options)),
        optimizer(sharded.parameters(), torch::optim::SGDOptions(0.01)) {}

  void backward(int64_t index) {
    const Batch batch = LayersTask::batch(index);
    LayersTask::loss(model->forward(batch.input), batch).backward();
  }
  // What a step added to the counts.
  ShardStats step(int64_t index = 0) {
    const ShardStats before = sharded.stats();
    optimizer.zero_grad();
    backward(index);
    optimizer.step();
    return sharded.stats() - before;
  }
  // Layers whose weights occupy memory or are about to.
  std::set<size_t> present() const {
    std::set<size_t> layers;
    for (size_t i = 0; i < kUnits; ++i) {
      if (sharded.state("layer" + std::to_string(i) + ".weight") != ParameterState::sharded)
        layers.insert(i);
    }
    return layers;
  }
};

TEST(Fetch, CountsOfAStep) {
  struct Expected {
    Strategy strategy;
    int64_t all_gathers, reduce_scatters, all_reduces;
  };
  // The last unit of a forward is the first of its backward, and where the order is known the one
  // before it is kept too. Biases, which are whole, are one all-reduce.
  for (const auto& [strategy, all_gathers, reduce_scatters, all_reduces] :
       {Expected{Strategy::full_shard, 2 * kUnits - 2, kUnits, 1},
        Expected{Strategy::shard_grad_op, kUnits, kUnits, 1},
        Expected{Strategy::optimizer, kUnits, 0, kUnits + 1},
        Expected{Strategy::no_shard, 0, 0, kUnits}}) {
    SCOPED_TRACE(name_of(strategy));
    comm::run_threads(2, [&](const comm::Group& group) {
      Watched run(group, weights_only(strategy));
      for (int step = 0; step < 3; ++step) {
        const ShardStats counts = run.step();
        const bool learns = step == 0 && strategy == Strategy::full_shard;
        EXPECT_EQ(counts.all_gathers, all_gathers + (learns ? 1 : 0));
        EXPECT_EQ(counts.reduce_scatters, reduce_scatters);
        EXPECT_EQ(counts.all_reduces, all_reduces);
      }
    });
  }
}

TEST(Fetch, NothingIsGatheredOnOneRank) {
  Watched run(comm::Group(), weights_only());
  const ShardStats counts = run.step();
  EXPECT_EQ(counts.all_gathers + counts.reduce_scatters + counts.all_reduces, 0);
}

TEST(Fetch, AheadOnceTheOrderIsKnown) {
  for (const Prefetch forward : {Prefetch::pre, Prefetch::post, Prefetch::none}) {
    for (const Prefetch backward : {Prefetch::pre, Prefetch::post, Prefetch::none}) {
      comm::run_threads(2, [&](const comm::Group& group) {
        FullyShardOptions options = weights_only();
        options.advanced.forward_prefetch = forward;
        options.advanced.backward_prefetch = backward;
        Watched run(group, options);
        EXPECT_EQ(run.step().fetched_ahead, 0) << "nothing is known";
        for (int step = 0; step < 3; ++step) {
          const ShardStats counts = run.step();
          // All but the first of a pass, less the one that pre keeps for the backward.
          const bool keeps = forward == Prefetch::pre && backward != Prefetch::none;
          const int64_t passes = (forward != Prefetch::none) + (backward != Prefetch::none);
          EXPECT_EQ(counts.fetched_ahead, passes * (kUnits - 1) - keeps);
          EXPECT_EQ(counts.all_gathers, 2 * kUnits - 1 - keeps);
        }
      });
    }
  }
}

TEST(Fetch, DepthZeroIsNone) {
  comm::run_threads(2, [&](const comm::Group& group) {
    FullyShardOptions options = weights_only();
    options.advanced.prefetch_depth = 0;
    Watched run(group, options);
    for (int step = 0; step < 3; ++step) EXPECT_EQ(run.step().fetched_ahead, 0);
  });
}

TEST(Fetch, NoMoreUnitsThanTheDepthSays) {
  for (const Prefetch when : {Prefetch::pre, Prefetch::post, Prefetch::none}) {
    for (const int depth : {1, 2}) {
      SCOPED_TRACE(testing::Message() << "depth " << depth);
      comm::run_threads(2, [&](const comm::Group& group) {
        FullyShardOptions options = weights_only();
        options.advanced.forward_prefetch = options.advanced.backward_prefetch = when;
        options.advanced.prefetch_depth = depth;
        Watched run(group, options);
        size_t most = 0;
        run.model->probe = [&](size_t, bool) { most = std::max(most, run.present().size()); };
        for (int step = 0; step < 4; ++step) run.step();
        const size_t limit = when == Prefetch::none ? 1 : 1 + static_cast<size_t>(depth);
        EXPECT_EQ(most, limit);
        EXPECT_THAT(run.present(), testing::IsEmpty()) << "after a backward";
      });
    }
  }
}

TEST(Fetch, ShardGradOpKeepsUnitsUntilTheirBackward) {
  comm::run_threads(2, [&](const comm::Group& group) {
    Watched run(group, weights_only(Strategy::shard_grad_op));
    std::vector<size_t> forward, backward;
    run.model->probe = [&](size_t, bool back) {
      (back ? backward : forward).push_back(run.present().size());
    };
    run.step();
    EXPECT_THAT(forward, testing::ElementsAre(1, 2, 3, 4));
    EXPECT_THAT(backward, testing::ElementsAre(4, 4, 3, 2));
  });
}

// What was fetched for an order that is no longer true.
TEST(Fetch, LimitAllGathersReleasesUnitsThatAreNotUsed) {
  for (const bool limit : {true, false}) {
    comm::run_threads(2, [&](const comm::Group& group) {
      FullyShardOptions options = weights_only();
      options.advanced.limit_all_gathers = limit;
      Watched run(group, options);
      for (int step = 0; step < 3; ++step) run.step();
      run.model->order = {0, 2, 3};
      bool kept = false;
      run.model->probe = [&](size_t layer, bool back) {
        if (layer == 2 && !back) kept = run.present().contains(1);
      };
      run.backward(0);
      EXPECT_EQ(kept, !limit);
      EXPECT_THAT(run.present(), testing::IsEmpty()) << "after the pass";
    });
  }
}

TEST(Fetch, AChangedOrderIsLearned) {
  comm::run_threads(2, [&](const comm::Group& group) {
    Watched run(group, weights_only());
    for (int step = 0; step < 3; ++step) run.step();
    const int64_t known = run.step().fetched_ahead;
    run.model->order = {2, 0, 3, 1};
    EXPECT_LT(run.step().fetched_ahead, known);
    run.step();
    EXPECT_EQ(run.step().fetched_ahead, known);
  });
}

// Passes of several kinds do not unlearn each other.
TEST(Fetch, EvaluationBetweenSteps) {
  comm::run_threads(2, [&](const comm::Group& group) {
    Watched run(group, weights_only());
    const auto evaluate = [&] {
      const at::NoGradGuard no_grad;
      const ShardStats before = run.sharded.stats();
      run.model->forward(LayersTask::batch(0).input);
      return run.sharded.stats() - before;
    };
    for (int i = 0; i < 3; ++i) {
      run.step();
      evaluate();
    }
    EXPECT_EQ(run.step().fetched_ahead, 2 * (kUnits - 1));
    const ShardStats counts = evaluate();
    EXPECT_EQ(counts.fetched_ahead, kUnits - 1);
    EXPECT_EQ(counts.all_gathers, kUnits);
  });
}

// In eval mode no unit is kept for a backward, or for a pass that may not come.
TEST(Fetch, InEvalModeUnitsAreReshardedAfterUse) {
  for (const Strategy strategy : {Strategy::full_shard, Strategy::shard_grad_op}) {
    for (const Prefetch when : {Prefetch::pre, Prefetch::post, Prefetch::none}) {
      for (const bool grad : {true, false}) {
        for (const bool trained : {true, false}) {
          comm::run_threads(2, [&](const comm::Group& group) {
            FullyShardOptions options = weights_only(strategy);
            options.advanced.forward_prefetch = when;
            Watched run(group, options);
            if (trained) run.step();
            run.sharded.eval();
            run.model->probe = [&](size_t layer, bool back) {
              if (back) return;
              // The next one may be on its way.
              auto present = run.present();
              if (when != Prefetch::none) present.erase(layer + 1);
              EXPECT_THAT(present, testing::IsEmpty()) << layer;
            };
            for (int pass = 0; pass < 3; ++pass) {
              const at::AutoGradMode mode(grad);
              const ShardStats before = run.sharded.stats();
              run.model->forward(LayersTask::batch(0).input);
              EXPECT_THAT(run.present(), testing::IsEmpty()) << "after pass " << pass;
              EXPECT_EQ((run.sharded.stats() - before).all_gathers, kUnits);
            }
            // Gradients come all the same, and training is as it was.
            run.backward(0);
            EXPECT_THAT(run.present(), testing::IsEmpty());
            run.optimizer.step();
            run.model->probe = nullptr;
            run.sharded.train();
            run.step();
            if (strategy == Strategy::shard_grad_op) {
              EXPECT_EQ(run.step().all_gathers, kUnits);
            }
          });
        }
      }
    }
  }
}

// A unit of several operators is gathered for each of them until it is known which is the last.
TEST(Fetch, InEvalModeTheLastUseOfAUnitIsLearned) {
  for (const bool trained : {true, false}) {
    comm::run_threads(2, [&](const comm::Group& group) {
      FullyShardOptions options = weights_only();
      options.units = parallel::ByPredicate([](const std::string& path, torch::nn::Module&) {
        return path == "layer0" || path == "layer2";  // the others are the model's own unit
      });
      Watched run(group, options);
      run.model->order = {0, 1, 3, 2};
      if (trained) run.step();
      run.sharded.eval();
      const at::NoGradGuard no_grad;
      const auto evaluate = [&] {
        const ShardStats before = run.sharded.stats();
        run.model->forward(LayersTask::batch(0).input);
        EXPECT_THAT(run.present(), testing::IsEmpty());
        return (run.sharded.stats() - before).all_gathers;
      };
      EXPECT_EQ(evaluate(), trained ? 3 : 4);
      EXPECT_EQ(evaluate(), 3);
      EXPECT_EQ(evaluate(), 3);
    });
  }
}

TEST(Fetch, NoSyncReducesOnceOrEachTime) {
  for (const auto kind :
       {parallel::NoSyncGradients::unreduced, parallel::NoSyncGradients::sharded}) {
    comm::run_threads(2, [&](const comm::Group& group) {
      FullyShardOptions options = weights_only();
      options.no_sync = kind;
      Watched run(group, options);
      const ShardStats before = run.sharded.stats();
      for (int i = 0; i < 2; ++i) {
        const auto guard = run.sharded.no_sync();
        run.backward(i);
      }
      run.backward(2);
      const ShardStats counts = run.sharded.stats() - before;
      const int times = kind == parallel::NoSyncGradients::unreduced ? 1 : 3;
      EXPECT_EQ(counts.reduce_scatters, times * kUnits);
      EXPECT_EQ(counts.all_reduces, times);
    });
  }
}

TEST(Fetch, OffloadedUnitsAreGatheredOnce) {
  comm::run_threads(2, [&](const comm::Group& group) {
    FullyShardOptions options = weights_only();
    options.advanced.keep_gathered_on_host = true;
    Watched run(group, options);
    for (int step = 0; step < 3; ++step) EXPECT_EQ(run.step().all_gathers, kUnits);
  });
}

TEST(Fetch, PinnedUnitsAreGatheredOnce) {
  comm::run_threads(2, [&](const comm::Group& group) {
    Watched run(group, weights_only());
    run.sharded.unshard("layer1");
    EXPECT_EQ(run.sharded.stats().all_gathers, 1);
    run.backward(0);
    EXPECT_EQ(run.sharded.stats().all_gathers, 2 * kUnits - 2);
    EXPECT_THAT(run.present(), testing::ElementsAre(1));
    run.sharded.reshard("layer1");
    EXPECT_THAT(run.present(), testing::IsEmpty());
  });
}

}  // namespace
}  // namespace lockstep::test
