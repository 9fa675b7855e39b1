// SPDX-License-Identifier: Apache-2.0
// Submodules that are sharded before the model around them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <fstream>
#include <optional>
#include <sstream>

#include "lockstep/comm/collectives.h"
#include "tests/parallel/shard/nesting.h"
#include "tests/parallel/shard/training.h"
#include "tests/support/says.h"

namespace lockstep::test::nesting {
namespace {

using parallel::fully_shard;
using parallel::FullyShardOptions;
using parallel::OneUnit;
using parallel::ParameterState;
using testing::Each;
using testing::ElementsAre;

// ---- training ----

struct Curves {
  ShardCurve nested, one_call;
};

// Rank 0's curves of the transformer with its blocks sharded first, and with its blocks as units.
Curves train_both(int ranks, FullyShardOptions options) {
  Curves curves;
  options.units = OneUnit{};
  comm::run_threads(
      ranks,
      [&](const comm::Group& group) {
        const mesh::Mesh mesh = mesh::Mesh::linear(group, "dp");
        const auto train = [&](const FullyShardOptions& outer, const ShardInside& inside) {
          return train_sharded<TransformerTask>(mesh, 2 * ranks, Optimizer::adamw, outer, 3,
                                                inside);
        };
        ShardCurve nested = train(options, [&](torch::nn::Module& model) {
          for (const char* block : {"block0", "block1"})
            fully_shard(child(model, block), mesh, options);  // what it returns goes at once
        });
        FullyShardOptions whole = options;
        whole.units = parallel::ByType{{"TransformerBlock"}};
        ShardCurve one_call = train(whole, nullptr);
        if (group.rank() == 0) curves = {std::move(nested), std::move(one_call)};
      },
      kThreads);
  return curves;
}

void expect_same_bits(const ShardCurve& actual, const ShardCurve& expected) {
  EXPECT_EQ(actual.losses, expected.losses);
  EXPECT_EQ(actual.norms, expected.norms);
  ASSERT_EQ(actual.weights.size(), expected.weights.size());
  for (size_t i = 0; i < expected.weights.size(); ++i)
    EXPECT_TRUE(at::equal(actual.weights[i], expected.weights[i])) << "parameter " << i;
}

TEST(Nesting, HasTheBitsOfOneCallWithTheSameUnits) {
  for (const int ranks : {1, 2, 4}) {
    SCOPED_TRACE(ranks);
    for (const Strategy strategy : kStrategies) {
      SCOPED_TRACE(name_of(strategy));
      const Curves curves = train_both(ranks, one_unit(strategy));
      expect_same_bits(curves.nested, curves.one_call);
    }
  }
  for (const int ranks : {1, 2}) {
    FullyShardOptions options = one_unit();
    options.mixed_precision = {.reduce = at::kDouble};
    options.use_orig_params = true;
    const Curves curves = train_both(ranks, options);
    expect_same_bits(curves.nested, curves.one_call);
  }
}

// Every submodule in its own way.
TEST(Nesting, FollowsOneProcessWhereOptionsDiffer) {
  for (const int ranks : {1, 2, 4}) {
    SCOPED_TRACE(ranks);
    const ShardCurve expected = train_whole<TransformerTask>(2 * ranks, Optimizer::sgd, 4);
    comm::run_threads(
        ranks,
        [&](const comm::Group& group) {
          const mesh::Mesh mesh = mesh::Mesh::linear(group, "dp");
          const ShardCurve actual = train_sharded<TransformerTask>(
              mesh, 2 * ranks, Optimizer::sgd, {.min_num_params = 1}, 4,
              [&](torch::nn::Module& model) {
                FullyShardOptions original = one_unit(Strategy::shard_grad_op);
                original.use_orig_params = true;
                FullyShardOptions kept{.mixed_precision = {.reduce = at::kDouble},
                                       .advanced = {.keep_gathered_on_host = true}};
                fully_shard(child(model, "tokens"), mesh, one_unit(Strategy::optimizer));
                fully_shard(child(model, "block0"), mesh, original);
                fully_shard(child(model, "block1"), mesh, kept);
                fully_shard(child(model, "norm"), mesh, one_unit(Strategy::no_shard));
              });
          for (size_t i = 0; i < expected.losses.size(); ++i) {
            EXPECT_NEAR(actual.losses[i], expected.losses[i], 1e-5 * expected.losses[i]);
            EXPECT_NEAR(actual.norms[i], expected.norms[i], 1e-5 * expected.norms[i]);
          }
          for (size_t i = 0; i < expected.weights.size(); ++i)
            EXPECT_LT(distance(actual.weights[i], expected.weights[i]), 1e-6) << "parameter " << i;
        },
        kThreads);
  }
}

TEST(Nesting, HybridShardingOfInnerAndOuter) {
  const ShardCurve expected = train_whole<TransformerTask>(4, Optimizer::sgd, 3);
  comm::run_threads(
      4,
      [&](const comm::Group& group) {
        const mesh::Mesh mesh(group, {{"replicate", 2}, {"shard", 2}});
        const ShardCurve actual = train_sharded<TransformerTask>(
            mesh, 4, Optimizer::sgd, one_unit(Strategy::hybrid_shard), 3,
            [&](torch::nn::Module& model) {
              fully_shard(child(model, "block0"), mesh, one_unit(Strategy::hybrid_shard));
              fully_shard(child(model, "head"), mesh, one_unit(Strategy::no_shard));
            });
        for (size_t i = 0; i < expected.weights.size(); ++i)
          EXPECT_LT(distance(actual.weights[i], expected.weights[i]), 1e-6) << "parameter " << i;
      },
      kThreads);
}

// ---- units and options ----

TEST(Nesting, UnitsAreNamedByTheirPlaceAndFetchedAhead) {
  comm::run_threads(
      2,
      [](const comm::Group& group) {
        Layers model, plain;
        for (const size_t layer : {1u, 2u}) fully_shard(*model->layers[layer], group, one_unit());
        auto sharded = fully_shard(*model, group, weights_only());
        EXPECT_THAT(sharded.units(),
                    ElementsAre("layer0", "layer1", "layer2", "layer3", "whole tensors"));
        torch::optim::SGD optimizer(sharded.parameters(), 0.1), reference(plain->parameters(), 0.1);
        for (int step = 0; step < 4; ++step) {
          optimizer.zero_grad();
          reference.zero_grad();
          backward(model, step);
          backward(plain, step);
          optimizer.step();
          reference.step();
        }
        EXPECT_GT(sharded.stats().fetched_ahead, 10);
        const auto values = by_name(sharded.full_state_dict());
        for (const auto& item : plain->named_parameters())
          EXPECT_LT(distance(values.at(item.key()), item.value()), 1e-6) << item.key();
      },
      kThreads);
}

TEST(Nesting, AnInnerModelHasItsOwnUnitsAndTypeNamesMayBeInside) {
  comm::run_threads(
      2,
      [](const comm::Group& group) {
        TinyTransformer model = TransformerTask::make(1);
        const auto wanted = [path = std::string("up")](const std::string& each, auto&) {
          return each == path;
        };
        fully_shard(child(*model, "block0"), group, {.units = wanted, .min_num_params = 1});
        fully_shard(child(*model, "block1"), group, {.units = OneUnit{}, .min_num_params = 1});
        const auto sharded = fully_shard(
            *model, group, {.units = parallel::ByType{{"TransformerBlock"}}, .min_num_params = 1});
        EXPECT_THAT(sharded.units(), ElementsAre("model", "block0", "block0.up", "block1"));
      },
      kThreads);
}

TEST(Nesting, OwnOptionsAct) {
  comm::run_threads(
      2,
      [](const comm::Group& group) {
        Layers model(5);
        FullyShardOptions wide = one_unit();
        wide.mixed_precision.param = at::kDouble;
        FullyShardOptions rows = one_unit(Strategy::shard_grad_op);
        rows.use_orig_params = true;
        rows.min_num_params = 1;
        fully_shard(*model->layers[0], group, one_unit(Strategy::optimizer));
        fully_shard(*model->layers[1], group, rows);
        fully_shard(*model->layers[4], group, wide);
        auto sharded = fully_shard(*model, group, weights_only());
        std::vector<std::string> names;
        for (const auto& parameter : sharded.named_parameters()) names.push_back(parameter.name);
        EXPECT_THAT(names, testing::IsSupersetOf({"layer0", "layer1.weight", "layer2", "layer4"}));
        backward(model, 0);
        const at::NoGradGuard no_grad;
        EXPECT_EQ(sharded.state("layer0.weight"), ParameterState::gathered);
        EXPECT_EQ(sharded.state("layer2.weight"), ParameterState::sharded);
        EXPECT_EQ(model->layers[4]->weight.scalar_type(), at::kDouble);
        EXPECT_EQ(model->layers[2]->weight.scalar_type(), at::kFloat);
        EXPECT_EQ(sharded.parameters()[0].scalar_type(), at::kFloat);
        EXPECT_EQ(sharded.shard_info("layer1.bias").original_shape, std::vector<int64_t>{32});
        EXPECT_THROW(sharded.shard_info("layer2.bias"), ConfigError);
        for (const at::Tensor& parameter : sharded.parameters()) parameter.mutable_grad().reset();
        // From forward to backward: only what was sharded so. Layer 3 is fetched for the backward.
        const at::AutoGradMode grad(true);
        const Batch batch = LayersTask::batch(1);
        const at::Tensor loss = LayersTask::loss(model->forward(batch.input).to(at::kFloat), batch);
        EXPECT_EQ(sharded.state("layer1.weight"), ParameterState::gathered);
        EXPECT_EQ(sharded.state("layer2.weight"), ParameterState::sharded);
        loss.backward();
      },
      kThreads);
}

struct NormedImpl : torch::nn::Module {
  torch::nn::BatchNorm1d inner = register_module("inner", torch::nn::BatchNorm1d(4));
  torch::nn::BatchNorm1d other = register_module("other", torch::nn::BatchNorm1d(4));
};

TEST(Nesting, BuffersFollowTheOptionsOfTheirModel) {
  comm::run_threads(2, [](const comm::Group& group) {
    const auto model = std::make_shared<NormedImpl>();
    fully_shard(*model->inner, group);
    const auto sharded = fully_shard(*model, group, {.mixed_precision = {.buffer = at::kDouble}});
    EXPECT_EQ(model->inner->running_mean.scalar_type(), at::kFloat);
    EXPECT_EQ(model->other->running_mean.scalar_type(), at::kDouble);
  });
}

// On one rank, too, where an inner call may have had nothing to do.
TEST(Nesting, ReproducibleUnitsHaveTheBitsOfAnyNumberOfRanks) {
  std::optional<ShardCurve> one;
  for (const int ranks : {1, 2, 4}) {
    SCOPED_TRACE(ranks);
    comm::run_threads(
        ranks,
        [&](const comm::Group& group) {
          const mesh::Mesh mesh = mesh::Mesh::linear(group, "dp");
          FullyShardOptions options = one_unit();
          options.reproducible = true;
          ShardCurve curve = train_sharded<TransformerTask>(
              mesh, 4, Optimizer::adamw, options, 3, [&](torch::nn::Module& model) {
                FullyShardOptions inner = options;
                inner.strategy = Strategy::optimizer;
                fully_shard(child(model, "block0"), mesh, inner);
              });
          if (group.rank() != 0) return;
          if (!one) one = curve;
          expect_same_bits(curve, *one);
        },
        kThreads);
  }
}

TEST(Nesting, OnOneRankTheOptionsOfPlainInnerModelsAreKept) {
  Layers model;
  const comm::Group alone;
  fully_shard(*model->layers[0], alone, one_unit());  // nothing is installed
  FullyShardOptions wide = one_unit();
  wide.mixed_precision.param = at::kDouble;
  const auto sharded = fully_shard(*model, alone, wide);
  EXPECT_EQ(model->layers[0]->weight.scalar_type(), at::kFloat);
  EXPECT_EQ(model->layers[1]->weight.scalar_type(), at::kDouble);
  EXPECT_THAT(sharded.units(), ElementsAre("layer0", "model", "whole tensors"));
  std::set<std::string> names;
  for (const auto& parameter : sharded.named_parameters())
    EXPECT_TRUE(names.insert(parameter.name).second) << parameter.name;
}

// ---- levels, ties, values ----

struct MiddleImpl : torch::nn::Module {
  torch::nn::Linear first = register_module("first", torch::nn::Linear(8, 8));
  torch::nn::Linear second = register_module("second", torch::nn::Linear(8, 8));
};

struct DeepImpl : torch::nn::Module {
  DeepImpl() { fill(*this, 5); }
  at::Tensor forward(const at::Tensor& x) {
    return at::tanh(after(at::tanh(middle->second(at::tanh(middle->first(before(x)))))));
  }
  torch::nn::Linear before = register_module("before", torch::nn::Linear(8, 8));
  std::shared_ptr<MiddleImpl> middle = register_module("middle", std::make_shared<MiddleImpl>());
  torch::nn::Linear after = register_module("after", torch::nn::Linear(8, 8));
};

TEST(Nesting, SeveralLevels) {
  comm::run_threads(
      4,
      [](const comm::Group& group) {
        const auto model = std::make_shared<DeepImpl>(), plain = std::make_shared<DeepImpl>();
        FullyShardOptions whole = shard_all(OneUnit{});
        whole.strategy = Strategy::optimizer;
        auto deepest = fully_shard(child(*model, "middle.first"), group, whole);
        auto middle = fully_shard(child(*model, "middle"), group, shard_all(OneUnit{}));
        EXPECT_THAT(middle.units(), ElementsAre("first", "model"));
        auto sharded = fully_shard(*model, group, shard_all(OneUnit{}));
        EXPECT_THAT(sharded.units(), ElementsAre("model", "middle.first", "middle"));
        require_same_state(sharded, *plain);
        torch::optim::SGD sgd = make_sgd(sharded.parameters()),
                          other = make_sgd(plain->parameters());
        for (int step = 0; step < 3; ++step) {
          const at::Tensor input = numbers({3, 8}, static_cast<uint64_t>(step));
          const at::Tensor loss = loss_of(model->forward(input));
          const at::Tensor expected = loss_of(plain->forward(input));
          require_same(loss, expected, "loss");
          loss.backward();
          expected.backward();
          require_same_gradients(sharded, *plain);
          EXPECT_EQ(sharded.state("middle.first.weight"), ParameterState::gathered);
          sgd.step();
          other.step();
          drop_gradients(plain->parameters());
          drop_gradients(sharded.parameters());
        }
        require_same_state(sharded, *plain);
        EXPECT_THAT(error_of([&] { deepest.parameters(); }), says("a larger one"));
        EXPECT_THAT(error_of([&] { middle.parameters(); }), says("a larger one"));
      },
      kThreads);
}

struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    fill(*this, 3);
    head->weight = head->register_parameter("tied", table->weight);
  }
  at::Tensor forward(const at::Tensor& x) { return at::linear(middle(table(x)), head->weight); }
  torch::nn::Embedding table = register_module("table", torch::nn::Embedding(12, 8));
  torch::nn::Linear middle = register_module("middle", torch::nn::Linear(8, 8));
  torch::nn::Linear head =
      register_module("head", torch::nn::Linear(torch::nn::LinearOptions(8, 12).bias(false)));
};

// A tied parameter belongs to the first module that has it, sharded before or not.
TEST(Nesting, TiedParameters) {
  for (const std::string inner : {"table", "head"}) {
    SCOPED_TRACE(inner);
    on_ranks([&](const comm::Group& group) {
      const auto model = std::make_shared<TiedImpl>(), plain = std::make_shared<TiedImpl>();
      fully_shard(child(*model, inner), group, shard_all(OneUnit{}));
      auto sharded = fully_shard(*model, group, shard_all(OneUnit{}));
      if (inner == "table") {
        EXPECT_THAT(sharded.units(), ElementsAre("table", "model"));
      } else {  // its own weight is another tensor
        EXPECT_THAT(sharded.units(), ElementsAre("model", "head"));
      }
      EXPECT_TRUE(model->head->weight.is_same(model->table->weight));
      torch::optim::SGD sgd = make_sgd(sharded.parameters());
      torch::optim::SGD other = make_sgd(parameters_of(*plain));
      for (int step = 0; step < 3; ++step) {
        const at::Tensor input = indices({2, 3}, 12, static_cast<uint64_t>(step));
        loss_of(model->forward(input)).backward();
        loss_of(plain->forward(input)).backward();
        sgd.step();
        other.step();
        drop_gradients(parameters_of(*plain));
        drop_gradients(sharded.parameters());
      }
      const auto values = by_name(sharded.full_state_dict());
      EXPECT_LT(distance(values.at("table.weight"), plain->table->weight), 1e-5);
      EXPECT_LT(distance(values.at("middle.weight"), plain->middle->weight), 1e-5);
    });
  }
}

TEST(Nesting, ValuesWrittenIntoAnInnerModelAreTakenOver) {
  comm::run_threads(
      2,
      [](const comm::Group& group) {
        Layers model, other = LayersTask::make(9);
        auto inner = fully_shard(*model->layers[1], group, one_unit());
        std::vector<optim::NamedTensor> values;
        for (const auto& item : other->layers[1]->named_parameters())
          values.push_back({item.key(), item.value()});
        inner.load_full_state_dict(values);
        {
          const auto guard = inner.summon({.write_back = true});
          const at::NoGradGuard no_grad;
          model->layers[1]->weight[0].fill_(3);
        }
        auto sharded = fully_shard(*model, group, weights_only());
        const auto found = by_name(sharded.full_state_dict());
        EXPECT_TRUE(at::equal(found.at("layer1.bias"), other->layers[1]->bias));
        EXPECT_TRUE(found.at("layer1.weight")[0].eq(3).all().item<bool>());
        EXPECT_TRUE(at::equal(found.at("layer1.weight")[1], other->layers[1]->weight[1]));
        const at::NoGradGuard no_grad;
        EXPECT_TRUE(at::equal(model->layers[1]->weight, found.at("layer1.weight")));
        sharded.load_full_state_dict(std::vector<optim::NamedTensor>(sharded.full_state_dict()));
      },
      kThreads);
}

// What is trained is asked again.
TEST(Nesting, FreezingBetweenTheCalls) {
  comm::run_threads(
      2,
      [](const comm::Group& group) {
        Layers model, plain;
        fully_shard(*model->layers[1], group, one_unit());
        model->layers[1]->weight.set_requires_grad(false);
        auto sharded = fully_shard(*model, group, weights_only());
        torch::optim::SGD optimizer(sharded.parameters(), 0.1);
        backward(model, 0);
        optimizer.step();
        const auto values = by_name(sharded.full_state_dict());
        EXPECT_TRUE(at::equal(values.at("layer1.weight"), plain->layers[1]->weight));
        EXPECT_FALSE(at::equal(values.at("layer2.weight"), plain->layers[2]->weight));
      },
      kThreads);
}

// ---- models without memory ----

TEST(Nesting, SubmodulesOfADeferredModelGetTheirValuesWithIt) {
  const auto make = [] {
    return torch::nn::Sequential(torch::nn::Linear(192, 192), torch::nn::Linear(192, 192),
                                 torch::nn::Linear(192, 4));
  };
  torch::nn::Sequential plain = parallel::materialize(parallel::deferred(make), {.seed = 3});
  for (const int ranks : {1, 2}) {
    SCOPED_TRACE(ranks);
    comm::run_threads(
        ranks,
        [&](const comm::Group& group) {
          auto built = parallel::deferred(make);
          FullyShardOptions wide = one_unit();
          wide.mixed_precision.param = at::kDouble;
          const auto inner = fully_shard(child(*built.model, "1"), group, wide);
          EXPECT_THAT(error_of([&] { inner.parameters(); }), says("meta device"));
          const auto sharded = fully_shard(built, group, one_unit(), {.seed = 3});
          EXPECT_THAT(error_of([&] { inner.parameters(); }), says("a larger one"));
          EXPECT_THAT(sharded.units(), ElementsAre("model", "1", "whole tensors"));
          EXPECT_EQ(built.model->named_parameters()["1.weight"].scalar_type(), at::kDouble);
          const auto values = by_name(sharded.full_state_dict());
          for (const auto& item : plain->named_parameters())
            EXPECT_TRUE(at::equal(values.at(item.key()), item.value())) << item.key();
        },
        kThreads);
  }
  // The bias is so small that it has memory, with nothing in it yet.
  const auto small = [] {
    return torch::nn::Sequential(torch::nn::Linear(192, 192), torch::nn::Linear(4, 4));
  };
  EXPECT_THAT(errors_of(
                  2,
                  [&](const comm::Group& group) {
                    auto built = parallel::deferred(small);
                    fully_shard(child(*built.model, "1"), group, one_unit());
                    fully_shard(built, group, one_unit(), {.seed = 3});
                  },
                  kThreads),
              Each(says("'1' was sharded ... initial values")));
}

size_t own_status(const std::string& field) {  // bytes
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(field + ":", 0) != 0) continue;
    size_t kilobytes = 0;
    std::istringstream(line.substr(field.size() + 1)) >> kilobytes;
    return kilobytes << 10;
  }
  return 0;
}

// Both ranks are in this process. Beside the shards of both, a unit is whole on each.
TEST(Nesting, MemoryOfShardsAndOneUnit) {
  constexpr int64_t kLayers = 24, kWidth = 1024;
  constexpr size_t kUnit = kWidth * kWidth * sizeof(float), kModel = kLayers * kUnit;
  mallopt(M_MMAP_THRESHOLD, 1 << 20);  // what is freed goes back to the system
  comm::run_threads(
      2,
      [&](const comm::Group& group) {
        torch::nn::Sequential model;
        for (int64_t i = 0; i < kLayers; ++i)
          model->push_back(torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false)));
        for (const auto& layer : model->children()) fully_shard(*layer, group, one_unit());
        comm::barrier(group).wait();
        const size_t before = own_status("VmRSS");
        comm::barrier(group).wait();
        if (group.rank() == 0) std::ofstream("/proc/self/clear_refs") << "5";  // the peak is now
        comm::barrier(group).wait();
        const auto sharded = fully_shard(*model, group, one_unit());
        comm::barrier(group).wait();
        // Units on their way take 24 MB, in a model of any size, and a unit more under load.
        EXPECT_LT(own_status("VmHWM"), before + kModel * 2 / 5) << "shards were there twice";
        EXPECT_EQ(sharded.stats().peak_bytes, static_cast<int64_t>(kModel / 2));
      },
      kThreads);
}

}  // namespace
}  // namespace lockstep::test::nesting
