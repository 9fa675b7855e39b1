// SPDX-License-Identifier: Apache-2.0
// Types: what parameters travel, are computed and are reduced in. Where the CPU's libtorch cannot
// multiply 16-bit matrices the model computes in float32; its parameters' type tells.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>

#include "lockstep/nn/linear.h"
#include "lockstep/optim/adamw.h"
#include "tests/parallel/shard/support.h"

namespace lockstep::test {
namespace {

using parallel::fully_shard;
using parallel::FullyShardOptions;
using parallel::MixedPrecision;

FullyShardOptions with(const MixedPrecision& precision, Strategy strategy = Strategy::full_shard) {
  FullyShardOptions options = weights_only(strategy);
  options.mixed_precision = precision;
  return options;
}

// A plain model that computes what the sharded one does: in its type, with weights that came in
// another.
Layers like(Layers sharded, at::ScalarType traveled) {
  const auto computed = sharded->layers[0]->weight.scalar_type();
  Layers plain = LayersTask::make(1);
  const at::NoGradGuard no_grad;
  for (auto& layer : plain->layers) layer->weight.copy_(layer->weight.to(traveled));
  plain->to(computed);
  return plain;
}

bool holds_exactly(const at::Tensor& tensor, at::ScalarType dtype) {
  return at::equal(tensor, tensor.to(dtype).to(tensor.scalar_type()));
}

TEST(Precision, ParametersTravelNarrow) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    for (const Strategy strategy :
         {Strategy::full_shard, Strategy::shard_grad_op, Strategy::optimizer}) {
      SCOPED_TRACE(name_of(strategy));
      comm::run_threads(2, [&](const comm::Group& group) {
        Layers model = LayersTask::make(1);
        auto sharded = fully_shard(*model, group, with({.param = dtype}, strategy));
        const auto computed = model->layers[0]->weight.scalar_type();
        EXPECT_TRUE(computed == dtype || computed == at::kFloat);
        Layers plain = like(model, dtype);
        const at::NoGradGuard no_grad;
        const at::Tensor input = LayersTask::batch(0).input;
        const at::Tensor output = model->forward(input);
        EXPECT_EQ(output.scalar_type(), computed);
        EXPECT_TRUE(at::equal(output, plain->forward(input.to(computed))));
        for (const at::Tensor& shard : sharded.parameters())
          EXPECT_EQ(shard.scalar_type(), at::kFloat) << "masters";
        Layers whole = LayersTask::make(1);
        const auto values = by_name(sharded.full_state_dict());
        for (const auto& item : whole->named_parameters())
          EXPECT_TRUE(at::equal(values.at(item.key()), item.value())) << "masters are not rounded";
      });
    }
  }
}

// Its operators take a scale, which stays float32, and add a bias.
TEST(Precision, LayersOf8BitsComputeWhatPlainOnesDo) {
  comm::run_threads(2, [&](const comm::Group& group) {
    const auto make = [] {
      nn::Linear linear(32, 16);
      const at::NoGradGuard no_grad;
      linear->weight.copy_(at::linspace(-1, 1, 512).view({16, 32}).to(at::kBFloat16));
      linear->bias.copy_(at::linspace(-2, 2, 16).to(at::kBFloat16));
      linear->float8 = true;
      return linear;
    };
    nn::Linear model = make(), plain = make();
    auto sharded = fully_shard(*model, group, with({.param = at::kBFloat16}));
    const auto computed = model->weight.scalar_type();
    plain->to(computed);
    const at::Tensor input = at::linspace(-3, 3, 32 * 4).view({4, 32});
    const at::Tensor output = model->forward(input.to(computed));
    EXPECT_EQ(output.scalar_type(), computed);
    EXPECT_TRUE(at::allclose(output, plain->forward(input.to(computed)), 1e-2, 1e-2));
    output.sum().backward();
    EXPECT_TRUE(sharded.parameters()[0].grad().defined());
  });
}

TEST(Precision, GradientsTravelNarrow) {
  for (const Strategy strategy :
       {Strategy::full_shard, Strategy::shard_grad_op, Strategy::optimizer, Strategy::no_shard}) {
    for (const bool keep : {false, true}) {
      SCOPED_TRACE(name_of(strategy));
      comm::run_threads(2, [&](const comm::Group& group) {
        Layers model = LayersTask::make(1), plain = LayersTask::make(1);
        auto sharded = fully_shard(
            *model, group,
            with({.reduce = at::kBFloat16, .keep_low_precision_grads = keep}, strategy));
        backward(model, 0);
        backward(plain, 0);
        for (const auto& [name, shard, parts] : sharded.named_parameters()) {
          EXPECT_EQ(shard.grad().scalar_type(), keep ? at::kBFloat16 : at::kFloat) << name;
          EXPECT_TRUE(holds_exactly(shard.grad(), at::kBFloat16)) << name;
        }
        // Same data on both ranks: only rounding is between.
        const double norm = sharded.grad_norm(), expected = optim::grad_norm(plain->parameters());
        EXPECT_NEAR(norm, expected, 4e-3 * expected);
        EXPECT_GT(std::abs(norm - expected), 0);
      });
    }
  }
}

TEST(Precision, ReducesInTheTypeOfParametersUnlessTold) {
  comm::run_threads(2, [&](const comm::Group& group) {
    Layers narrow = LayersTask::make(1), wide = LayersTask::make(1);
    const auto first = fully_shard(*narrow, group, with({.param = at::kBFloat16}));
    const auto second =
        fully_shard(*wide, group, with({.param = at::kBFloat16, .reduce = at::kFloat}));
    backward(narrow, group.rank());
    backward(wide, group.rank());
    bool all = true;
    for (const at::Tensor& shard : first.parameters())
      EXPECT_TRUE(holds_exactly(shard.grad(), at::kBFloat16));
    for (const at::Tensor& shard : second.parameters())
      all = all && holds_exactly(shard.grad(), at::kBFloat16);
    EXPECT_FALSE(all);
  });
}

TEST(Precision, NarrowModelsTrain) {
  struct Case {
    MixedPrecision precision;
    double within;
  };
  for (const auto& [precision, within] :
       {Case{{.param = at::kBFloat16, .reduce = at::kFloat}, 0.05},
        Case{{.param = at::kHalf, .reduce = at::kFloat}, 0.02},
        Case{{.param = at::kBFloat16, .keep_low_precision_grads = true}, 0.05}}) {
    comm::run_threads(2, [&](const comm::Group& group) {
      Layers model = LayersTask::make(1), plain = LayersTask::make(1);
      auto sharded = fully_shard(*model, group, with(precision));
      optim::AdamW optimizer(sharded.named_parameters(), {.lr = 1e-2});
      optim::AdamW reference(*plain, {.lr = 1e-2});
      double loss = 0, expected = 0, first = 0;
      for (int step = 0; step < 10; ++step) {
        const Batch batch = LayersTask::batch(0);
        const at::Tensor mine = LayersTask::loss(model->forward(batch.input).to(at::kFloat), batch);
        const at::Tensor other = LayersTask::loss(plain->forward(batch.input), batch);
        optimizer.zero_grad();
        reference.zero_grad();
        mine.backward();
        other.backward();
        optimizer.step();
        reference.step();
        loss = mine.item<double>();
        expected = other.item<double>();
        if (step == 0) first = expected;
      }
      EXPECT_LT(expected, 0.5 * first);
      EXPECT_NEAR(loss, expected, within * first);
    });
  }
}

// This one computes in another type than the model's on every machine.
TEST(Precision, DoubleModelInFloat) {
  comm::run_threads(2, [](const comm::Group& group) {
    Layers model = LayersTask::make(1), plain = LayersTask::make(1);
    model->to(torch::kDouble);
    auto sharded = fully_shard(*model, group, with({.param = at::kFloat}));
    EXPECT_EQ(model->layers[0]->weight.scalar_type(), at::kFloat);
    EXPECT_EQ(model->layers[0]->bias.scalar_type(), at::kFloat);
    for (const at::Tensor& shard : sharded.parameters())
      EXPECT_EQ(shard.scalar_type(), at::kDouble);
    torch::optim::SGD optimizer(sharded.parameters(), 0.1);
    torch::optim::SGD reference(plain->parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      const Batch batch = LayersTask::batch(step);
      const at::Tensor output = model->forward(batch.input.to(at::kDouble));
      EXPECT_EQ(output.scalar_type(), at::kFloat);
      const at::Tensor expected = plain->forward(batch.input);
      if (step == 0) {
        EXPECT_TRUE(at::equal(output, expected));
      }
      optimizer.zero_grad();
      reference.zero_grad();
      LayersTask::loss(output, batch).backward();
      LayersTask::loss(expected, batch).backward();
      for (const at::Tensor& shard : sharded.parameters())
        EXPECT_EQ(shard.grad().scalar_type(), at::kDouble);
      optimizer.step();
      reference.step();
    }
    const auto values = by_name(sharded.full_state_dict());
    for (const auto& item : plain->named_parameters())
      EXPECT_LT(distance(values.at(item.key()), item.value()), 1e-6) << item.key();
  });
}

TEST(Precision, Buffers) {
  for (const int ranks : {1, 2}) {
    comm::run_threads(ranks, [](const comm::Group& group) {
      ConvNet model = ConvNetTask::make(1);
      const auto sharded = fully_shard(*model, group, {.mixed_precision = {.buffer = at::kDouble}});
      int converted = 0;
      for (const auto& item : model->named_buffers()) {
        const bool counts = item.key().find("num_batches") != std::string::npos;
        EXPECT_EQ(item.value().scalar_type(), counts ? at::kLong : at::kDouble) << item.key();
        converted += counts ? 0 : 1;
      }
      EXPECT_EQ(converted, 4);
      EXPECT_EQ(model->parameters()[0].scalar_type(), at::kFloat);
    });
  }
}

TEST(Precision, OneRankTrainsInANarrowType) {
  Layers model = LayersTask::make(1);
  auto sharded = fully_shard(*model, comm::Group(), with({.param = at::kBFloat16}));
  optim::AdamW optimizer(sharded.named_parameters());
  for (int i = 0; i < 3; ++i) {
    optimizer.zero_grad();
    backward(model, i);
    optimizer.step();
  }
  for (const auto& [name, tensor] : sharded.full_state_dict())
    EXPECT_TRUE(at::isfinite(tensor).all().item<bool>()) << name;
}

}  // namespace
}  // namespace lockstep::test
