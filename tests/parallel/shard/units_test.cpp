// SPDX-License-Identifier: Apache-2.0
// Which parameters go together, and that of several kinds each is treated as its own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <algorithm>
#include <memory>
#include <set>

#include "tests/parallel/shard/follow.h"
#include "tests/support/sampling.h"

namespace lockstep::test {
namespace {

using parallel::fully_shard;
using parallel::FullyShardOptions;
using testing::ElementsAre;
using Names = std::vector<std::string>;

// ---- units ----

template <class Make>
Names units_of(const FullyShardOptions& options, Make make) {
  Names names;
  comm::run_threads(2, [&](const comm::Group& group) {
    auto model = make();
    const auto sharded = fully_shard(*model, group, options);
    if (group.rank() == 0) names = sharded.units();
  });
  return names;
}

TinyTransformer transformer() { return TransformerTask::make(1); }

TEST(Units, SizeChoosesUnits) {
  const Names units =
      units_of({.units = parallel::BySize{1000}, .min_num_params = 100}, transformer);
  EXPECT_THAT(units, ElementsAre("tokens", "model", "block0.qkv", "block0.out", "block0.up",
                                 "block0.down", "block1.qkv", "block1.out", "block1.up",
                                 "block1.down", "head", "whole tensors"));
  EXPECT_THAT(units_of({.units = parallel::BySize{6000}, .min_num_params = 100}, transformer),
              ElementsAre("model", "block0", "block1", "whole tensors"));
}

TEST(Units, TypeNamesChooseUnits) {
  for (const char* name :
       {"TransformerBlock", "TransformerBlockImpl", "lockstep::test::TransformerBlockImpl"}) {
    EXPECT_THAT(units_of({.units = parallel::ByType{{name}}}, transformer),
                ElementsAre("model", "block0", "block1", "whole tensors"))
        << name;
  }
}

TEST(Units, NestedUnitsOwnTheirOwnParameters) {
  const Names units =
      units_of({.units = parallel::ByType{{"TransformerBlock", "Linear"}}, .min_num_params = 1},
               transformer);
  EXPECT_THAT(
      units, ElementsAre("model", "block0", "block0.qkv", "block0.out", "block0.up", "block0.down",
                         "block1", "block1.qkv", "block1.out", "block1.up", "block1.down", "head"));
}

TEST(Units, APredicateChoosesUnits) {
  const auto wanted = [](const std::string& path, torch::nn::Module& module) {
    return path == "block1" && module.as<TransformerBlockImpl>() != nullptr;
  };
  EXPECT_THAT(units_of({.units = wanted}, transformer),
              ElementsAre("model", "block1", "whole tensors"));
}

TEST(Units, OneUnitHoldsTheWholeModel) {
  EXPECT_THAT(units_of({.units = parallel::OneUnit{}}, transformer),
              ElementsAre("model", "whole tensors"));
  EXPECT_THAT(units_of({.units = parallel::OneUnit{}, .min_num_params = 1}, transformer),
              ElementsAre("model"));
}

// The memory of units shares a few descriptors.
TEST(Units, ThousandsOfUnitsShareFewFileDescriptors) {
  const int count = tests_all() ? 5000 : 300;
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit few{100, before.rlim_max};  // for all ranks together
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  comm::run_threads(2,
                    [&](const comm::Group& group) {
                      torch::nn::Sequential model;
                      for (int i = 0; i < count; ++i) model->push_back(torch::nn::Linear(8, 8));
                      for (const at::Tensor& parameter : model->parameters())
                        parameter.detach().fill_(0.125);  // the same on both ranks
                      const at::Tensor input = at::ones({2, 8});
                      const at::Tensor expected = model->forward(input).detach();
                      const auto sharded =
                          fully_shard(*model, group,
                                      {.units = parallel::ByType{{"Linear"}}, .min_num_params = 1});
                      check(sharded.units().size() >= static_cast<size_t>(count), "a unit each");
                      const at::Tensor output = model->forward(input);
                      check(at::equal(output, expected), "what one process computes");
                      output.sum().backward();
                      check(sharded.parameters()[0].grad().defined(), "gradients");
                    },
                    {.backend = "shm"});
  EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
}

// Names of units are paths, and a child may be called as the model's own unit is.
struct OuterImpl : torch::nn::Module {
  OuterImpl() : inner(register_module("model", torch::nn::Linear(32, 32))) {
    own = register_parameter("own", at::ones({32, 32}));
    fill_parameters(*this, 3);
  }
  at::Tensor forward(const at::Tensor& x) { return at::tanh(inner(x)).matmul(own); }
  torch::nn::Linear inner;
  at::Tensor own;
};
TORCH_MODULE(Outer);

TEST(Units, AChildCalledModelHasItsOwnUnit) {
  comm::run_threads(2, [](const comm::Group& group) {
    Outer model;
    auto sharded = fully_shard(*model, group, {.units = parallel::BySize{1}});
    const Names units = sharded.units();
    EXPECT_EQ(std::set<std::string>(units.begin(), units.end()).size(), 3u)
        << testing::PrintToString(units);
    std::set<std::string> names;
    for (const auto& [name, tensor, parts] : sharded.named_parameters()) names.insert(name);
    EXPECT_EQ(names.size(), sharded.parameters().size());
    sharded.unshard("model");
    EXPECT_EQ(sharded.state("model.weight"), parallel::ParameterState::gathered);
    EXPECT_EQ(sharded.state("own"), parallel::ParameterState::sharded);
  });
}

TEST(Units, EveryPolicyTrains) {
  for (const parallel::UnitPolicy& units : std::vector<parallel::UnitPolicy>{
           parallel::BySize{1}, parallel::ByType{{"TransformerBlock", "Linear"}},
           parallel::OneUnit{}}) {
    expect_follows<TransformerTask>(2, {.units = units, .min_num_params = 1});
  }
}

// ---- parameters of several kinds ----

// One tensor under two names.
struct TiedImpl : torch::nn::Module {
  TiedImpl() : first(register_module("first", torch::nn::Linear(16, 16))) {
    auto other = std::make_shared<torch::nn::Module>("Other");
    second = other->register_parameter("weight", first->weight);
    register_module("second", other);
  }
  at::Tensor forward(const at::Tensor& x) { return at::tanh(first(x)).matmul(second); }
  torch::nn::Linear first;
  at::Tensor second;
};
TORCH_MODULE(Tied);

struct TiedTask {
  using Model = Tied;
  static Tied make(uint64_t seed) {
    Tied model;
    fill_parameters(*model, seed);
    return model;
  }
  static Batch batch(int64_t index) {
    const at::Tensor x = at::sin(at::arange(64, at::kFloat) * (1 + 0.1 * index)).view({4, 16});
    return {x, at::cos(x * 3)};
  }
  static at::Tensor loss(const at::Tensor& output, const Batch& batch) {
    return at::mse_loss(output, batch.target);
  }
};

TEST(ParameterKinds, TiedParametersAreOne) {
  for (const bool orig : {false, true}) {
    comm::run_threads(3, [&](const comm::Group& group) {
      Tied model = TiedTask::make(1), plain = TiedTask::make(1);
      auto sharded = fully_shard(*model, group, {.min_num_params = 1, .use_orig_params = orig});
      EXPECT_TRUE(model->first->weight.is_same(model->second));
      EXPECT_TRUE(model->named_parameters()["second.weight"].is_same(model->first->weight));
      EXPECT_EQ(sharded.stats().num_parameters, 16 * 16 + 16);
      EXPECT_EQ(sharded.full_state_dict().size(), 2u);
      torch::optim::SGD optimizer(sharded.parameters(), 0.1);
      torch::optim::SGD plain_optimizer({plain->first->weight, plain->first->bias}, 0.1);
      for (int step = 0; step < 4; ++step) {
        const Batch batch = TiedTask::batch(step);
        optimizer.zero_grad();
        TiedTask::loss(model->forward(batch.input), batch).backward();
        optimizer.step();
        plain_optimizer.zero_grad();
        TiedTask::loss(plain->forward(batch.input), batch).backward();
        plain_optimizer.step();
      }
      EXPECT_TRUE(model->first->weight.is_same(model->second));
      EXPECT_TRUE(at::equal(model->first->weight, model->second));
      EXPECT_LT(distance(model->second, plain->second), 1e-6);
    });
  }
}

struct MixedImpl : torch::nn::Module {
  MixedImpl()
      : single(register_module("single", torch::nn::Linear(16, 16))),
        twice(register_module("double", torch::nn::Linear(16, 16))),
        frozen(register_module("frozen", torch::nn::Linear(16, 16))) {
    twice->to(torch::kDouble);
    frozen->weight.set_requires_grad(false);
    frozen->bias.set_requires_grad(false);
  }
  at::Tensor forward(const at::Tensor& x) {
    return twice(at::tanh(frozen(at::tanh(single(x)))).to(at::kDouble)).to(at::kFloat);
  }
  torch::nn::Linear single, twice, frozen;
};
TORCH_MODULE(Mixed);

struct MixedTask : TiedTask {
  using Model = Mixed;
  static Mixed make(uint64_t seed) {
    Mixed model;
    fill_parameters(*model, seed);
    return model;
  }
};

TEST(ParameterKinds, DtypesAndFrozenParametersShareAUnit) {
  for (const Strategy strategy :
       {Strategy::full_shard, Strategy::shard_grad_op, Strategy::optimizer, Strategy::no_shard}) {
    for (const bool orig : {false, true}) {
      SCOPED_TRACE(name_of(strategy));
      expect_follows<MixedTask>(2, {.strategy = strategy,
                                    .units = parallel::OneUnit{},
                                    .min_num_params = 20,
                                    .use_orig_params = orig});
    }
  }
  comm::run_threads(2, [](const comm::Group& group) {
    Mixed model = MixedTask::make(1);
    const at::Tensor before = model->frozen->weight.clone();
    const auto sharded =
        fully_shard(*model, group, {.units = parallel::OneUnit{}, .min_num_params = 20});
    Names names;
    for (const auto& [name, tensor, parts] : sharded.named_parameters()) names.push_back(name);
    EXPECT_THAT(names, ElementsAre("model:Float", "model:Double", "single.bias", "double.bias"));
    EXPECT_EQ(sharded.state("frozen.weight"), parallel::ParameterState::sharded);
    EXPECT_TRUE(at::equal(model->frozen->weight, before));
  });
}

TEST(ParameterKinds, SmallTensorsAreWholeAndAveraged) {
  comm::run_threads(2, [](const comm::Group& group) {
    Layers model = LayersTask::make(1), plain = LayersTask::make(1);
    const auto sharded = fully_shard(*model, group, weights_only());
    const auto backward = [](Layers layers, int64_t index) {
      const Batch batch = LayersTask::batch(index);
      LayersTask::loss(layers->forward(batch.input), batch).backward();
    };
    backward(model, group.rank());
    for (int i = 0; i < 2; ++i) backward(plain, i);
    for (size_t i = 0; i < 4; ++i) {
      const at::Tensor& bias = model->layers[i]->bias;
      EXPECT_LT(distance(bias.grad(), plain->layers[i]->bias.grad() / 2), 1e-7);
      const auto owned = sharded.parameters();
      EXPECT_TRUE(std::any_of(owned.begin(), owned.end(),
                              [&](const at::Tensor& each) { return each.is_same(bias); }));
    }
  });
}

TEST(ParameterKinds, MinNumParamsDecidesWhatIsWhole) {
  comm::run_threads(2, [](const comm::Group& group) {
    for (const auto& [least, sharded_count] :
         std::vector<std::pair<int64_t, int>>{{1, 8}, {32, 8}, {33, 4}, {1024, 4}, {1025, 0}}) {
      Layers model;
      const auto sharded = fully_shard(*model, group, {.min_num_params = least});
      int count = 0;
      for (const auto& item : model->named_parameters())
        count += error_of([&] { sharded.shard_info(item.key()); }).empty() ? 1 : 0;
      EXPECT_EQ(count, sharded_count) << least;
    }
  });
}

}  // namespace
}  // namespace lockstep::test
