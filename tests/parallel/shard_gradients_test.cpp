// The gradients of a sharded model: their norms, and what they add up to.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>

#include "lockstep/optim/adamw.h"
#include "lockstep/optim/clip.h"
#include "lockstep/optim/step_guard.h"
#include "tests/parallel/shard_support.h"

namespace lockstep::test {
namespace {

using parallel::fully_shard;
using parallel::FullyShardOptions;

TEST(Norms, ThoseOfTheWholeModel) {
  for (const Strategy strategy :
       {Strategy::full_shard, Strategy::shard_grad_op, Strategy::optimizer, Strategy::no_shard,
        Strategy::hybrid_shard}) {
    SCOPED_TRACE(name_of(strategy));
    comm::run_threads(4, [&](const comm::Group& group) {
      Layers model = LayersTask::make(1), plain = LayersTask::make(1);
      FullyShardOptions options = weights_only(strategy);
      if (strategy == Strategy::hybrid_shard) options.hybrid_group_size = 2;
      auto sharded = fully_shard(*model, group, options);
      backward(model, 0);
      backward(plain, 0);
      const auto reference = plain->parameters();
      const double l2 = optim::grad_norm(reference);
      const double max = optim::grad_norm(reference, {.type = optim::NormType::max});
      EXPECT_NEAR(sharded.grad_norm(), l2, 1e-6 * l2);
      EXPECT_NEAR(sharded.grad_norm({.exact = true}), l2, 1e-6 * l2);
      EXPECT_NEAR(sharded.grad_norm({.type = optim::NormType::max}), max, 1e-6 * max);
      EXPECT_NEAR(sharded.clip_grad_norm(l2 / 2), l2, 1e-6 * l2);
      EXPECT_NEAR(sharded.grad_norm(), l2 / 2, 1e-4 * l2);
    });
  }
}

TEST(Norms, NotANumberIsSeenByAll) {
  for (const Strategy strategy : kStrategies) {
    SCOPED_TRACE(name_of(strategy));
    comm::run_threads(3, [&](const comm::Group& group) {
      Layers model = LayersTask::make(1), plain = LayersTask::make(1);
      auto sharded = fully_shard(*model, group, weights_only(strategy));
      optim::AdamW optimizer(sharded.named_parameters());
      optim::StepGuard guard(group);
      Batch batch = LayersTask::batch(0);
      if (group.rank() == 1)
        batch.target = at::full_like(batch.target, std::numeric_limits<float>::quiet_NaN());
      LayersTask::loss(model->forward(batch.input), batch).backward();
      EXPECT_TRUE(std::isnan(sharded.grad_norm()));
      EXPECT_FALSE(guard.step(optimizer));
      EXPECT_EQ(guard.skipped_steps(), 1);
      optimizer.zero_grad();
      const auto values = by_name(sharded.full_state_dict());
      for (const auto& item : plain->named_parameters())
        EXPECT_TRUE(at::equal(values.at(item.key()), item.value())) << item.key();
      backward(model, 0);
      EXPECT_TRUE(guard.step(optimizer));
    });
  }
}

TEST(Gradients, ZeroGradOfTheModel) {
  for (const Strategy strategy : kStrategies) {
    SCOPED_TRACE(name_of(strategy));
    comm::run_threads(2, [&](const comm::Group& group) {
      Layers model = LayersTask::make(1), plain = LayersTask::make(1);
      auto sharded = fully_shard(*model, group, weights_only(strategy));
      torch::optim::SGD optimizer(sharded.parameters(), 0.1);
      torch::optim::SGD reference(plain->parameters(), 0.1);
      for (int step = 0; step < 3; ++step) {
        model->zero_grad();
        plain->zero_grad();
        backward(model, step);
        backward(plain, step);
        optimizer.step();
        reference.step();
      }
      const auto values = by_name(sharded.full_state_dict());
      for (const auto& item : plain->named_parameters())
        EXPECT_LT(distance(values.at(item.key()), item.value()), 1e-6) << item.key();
    });
  }
}

TEST(Gradients, SeveralBackwardsAddUp) {
  for (const Strategy strategy : kStrategies) {
    SCOPED_TRACE(name_of(strategy));
    comm::run_threads(2, [&](const comm::Group& group) {
      Layers model = LayersTask::make(1), plain = LayersTask::make(1);
      auto sharded = fully_shard(*model, group, weights_only(strategy));
      for (int i = 0; i < 3; ++i) {
        backward(model, i);
        backward(plain, i);
      }
      const double expected = optim::grad_norm(plain->parameters());
      EXPECT_NEAR(sharded.grad_norm(), expected, 1e-6 * expected);
    });
  }
}

}  // namespace
}  // namespace lockstep::test
