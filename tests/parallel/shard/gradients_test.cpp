// SPDX-License-Identifier: Apache-2.0
// The gradients of a sharded model: their norms, and what they add up to.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <limits>

#include "lockstep/optim/adamw.h"
#include "lockstep/optim/clip.h"
#include "lockstep/optim/step_guard.h"
#include "tests/parallel/shard/support.h"

namespace lockstep::test {
namespace {

using parallel::fully_shard;
using parallel::FullyShardOptions;

TEST(Norms, AreThoseOfTheWholeModel) {
  for (const Strategy strategy :
       {Strategy::full_shard, Strategy::shard_grad_op, Strategy::optimizer, Strategy::no_shard,
        Strategy::hybrid_shard}) {
    SCOPED_TRACE(name_of(strategy));
    comm::run_threads(4, [&](const comm::Group& group) {
      Layers model = LayersTask::make(1), plain = LayersTask::make(1);
      FullyShardOptions options = weights_only(strategy);
      if (strategy == Strategy::hybrid_shard) options.advanced.hybrid_group_size = 2;
      auto sharded = fully_shard(*model, group, options);
      backward(model, 0);
      backward(plain, 0);
      const auto reference = plain->parameters();
      const double l2 = optim::grad_norm(reference);
      const double max = optim::grad_norm(reference, {.type = optim::NormType::max});
      EXPECT_NEAR(sharded.grad_norm(), l2, 1e-6 * l2);
      EXPECT_NEAR(sharded.grad_norm({.exact = true}), l2, 1e-6 * l2);
      EXPECT_NEAR(sharded.grad_norm({.type = optim::NormType::max}), max, 1e-6 * max);
      EXPECT_NEAR(sharded.clip_grad_norm_(l2 / 2), l2, 1e-6 * l2);
      EXPECT_NEAR(sharded.grad_norm(), l2 / 2, 1e-4 * l2);
    });
  }
}

TEST(Norms, ANanIsSeenByAllRanks) {
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

// zero_grad() drops what backward passes under no_sync() left, as it does in one process.
TEST(Gradients, DroppedBeforeTheyAreReduced) {
  for (const Strategy strategy : kStrategies) {
    for (const bool set_to_none : {false, true}) {
      for (const bool reduced_before : {false, true}) {
        SCOPED_TRACE(name_of(strategy));
        comm::run_threads(2, [&](const comm::Group& group) {
          Layers model = LayersTask::make(1), plain = LayersTask::make(1);
          auto sharded = fully_shard(*model, group, weights_only(strategy));
          if (reduced_before) backward(model, 5);
          {
            const auto guard = sharded.no_sync();
            backward(model, 0);
          }
          for (const at::Tensor& parameter : sharded.parameters()) {
            at::Tensor& gradient = parameter.mutable_grad();
            if (set_to_none) {
              gradient.reset();
            } else {
              gradient.zero_();
            }
          }
          backward(model, 1);
          backward(plain, 1);
          const double expected = optim::grad_norm(plain->parameters());
          EXPECT_NEAR(sharded.grad_norm(), expected, 1e-6 * expected);
        });
      }
    }
  }
}

TEST(Gradients, WhatWasDroppedAndNotUsedAgainIsUndefined) {
  for (const Strategy strategy : kStrategies) {
    SCOPED_TRACE(name_of(strategy));
    comm::run_threads(2, [&](const comm::Group& group) {
      Layers model = LayersTask::make(1);
      auto sharded = fully_shard(*model, group, weights_only(strategy));
      {
        const auto guard = sharded.no_sync();
        backward(model, 0);
      }
      for (const at::Tensor& parameter : sharded.parameters()) parameter.mutable_grad().reset();
      model->order = {0, 1};
      backward(model, 1);
      for (const auto& [name, tensor, parts] : sharded.named_parameters()) {
        const bool used = name.starts_with("layer0") || name.starts_with("layer1");
        EXPECT_EQ(tensor.grad().defined(), used) << name;
      }
    });
  }
}

// A function that has no gradient for one of its inputs.
struct Nothing : torch::autograd::Function<Nothing> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x,
                            const at::Tensor& /*parameter*/) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    return {gradients[0], at::Tensor()};
  }
};

TEST(Gradients, NothingAddsNothing) {
  for (const Strategy strategy : kStrategies) {
    SCOPED_TRACE(name_of(strategy));
    comm::run_threads(2, [&](const comm::Group& group) {
      Layers model = LayersTask::make(1), plain = LayersTask::make(1);
      auto sharded = fully_shard(*model, group, weights_only(strategy));
      for (Layers net : {model, plain}) {
        backward(net, 0);
        for (int i = 1; i < 3; ++i) {
          const Batch batch = LayersTask::batch(i);
          const at::Tensor x = Nothing::apply(batch.input, net->layers[2]->weight);
          LayersTask::loss(at::tanh(net->layers[0](x)), batch).backward();
        }
      }
      const double expected = optim::grad_norm(plain->parameters());
      EXPECT_NEAR(sharded.grad_norm(), expected, 1e-6 * expected) << name_of(strategy);
    });
  }
}

}  // namespace
}  // namespace lockstep::test
