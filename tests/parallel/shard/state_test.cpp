// SPDX-License-Identifier: Apache-2.0
// The values of a sharded model: gathered by hand, whole, in parts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <cstring>
#include <mutex>

#include "lockstep/comm/collectives.h"
#include "lockstep/optim/adamw.h"
#include "tests/parallel/shard/support.h"

namespace lockstep::test {
namespace {

using parallel::fully_shard;
using parallel::FullyShardOptions;
using parallel::ParameterState;
using parallel::ShardedModel;
using testing::HasSubstr;

TEST(Unshard, OneUnitAndAll) {
  comm::run_threads(2, [](const comm::Group& group) {
    Layers model = LayersTask::make(1), plain = LayersTask::make(1);
    auto sharded = fully_shard(*model, group, weights_only());
    const auto state = [&](int layer) {
      return sharded.state("layer" + std::to_string(layer) + ".weight");
    };
    EXPECT_EQ(state(1), ParameterState::sharded);
    sharded.unshard("layer1");
    EXPECT_EQ(state(1), ParameterState::gathered);
    EXPECT_EQ(state(2), ParameterState::sharded);
    const auto* data = model->layers[1]->weight.data_ptr<float>();
    EXPECT_EQ(data[1023], plain->layers[1]->weight.data_ptr<float>()[1023]);
    sharded.reshard("layer1");
    EXPECT_EQ(state(1), ParameterState::sharded);

    sharded.unshard();
    for (int i = 0; i < 4; ++i) EXPECT_EQ(state(i), ParameterState::gathered);
    backward(model, 0);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(state(i), ParameterState::gathered) << "kept";
    sharded.reshard();
    for (int i = 0; i < 4; ++i) EXPECT_EQ(state(i), ParameterState::sharded);
    EXPECT_THAT(error_of([&] { sharded.unshard("layer7"); }),
                HasSubstr("no unit 'layer7'; the units are layer0, layer1"));
  });
}

// What was pinned over a step must not be what was gathered before it.
TEST(Unshard, OverAStep) {
  comm::run_threads(2, [](const comm::Group& group) {
    Layers model = LayersTask::make(1), plain = LayersTask::make(1);
    auto sharded = fully_shard(*model, group, weights_only());
    torch::optim::SGD optimizer(sharded.parameters(), 0.5);
    torch::optim::SGD reference(plain->parameters(), 0.5);
    sharded.unshard();
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      reference.zero_grad();
      backward(model, step);
      backward(plain, step);
      optimizer.step();
      reference.step();
    }
    for (size_t i = 0; i < 4; ++i)
      EXPECT_LT(distance(model->layers[i]->weight, plain->layers[i]->weight), 1e-6);
    sharded.reshard();
  });
}

TEST(Summon, ShowsWholeParameters) {
  for (const Strategy strategy : kStrategies) {
    SCOPED_TRACE(name_of(strategy));
    comm::run_threads(3, [&](const comm::Group& group) {
      Layers model = LayersTask::make(1), plain = LayersTask::make(1);
      auto sharded = fully_shard(*model, group, weights_only(strategy));
      {
        const auto guard = sharded.summon();
        for (size_t i = 0; i < 4; ++i) {
          const at::Tensor& weight = model->layers[i]->weight;
          EXPECT_EQ(sharded.state("layer" + std::to_string(i) + ".weight"),
                    ParameterState::gathered);
          EXPECT_EQ(
              std::memcmp(weight.data_ptr(), plain->layers[i]->weight.data_ptr(), weight.nbytes()),
              0);
        }
      }
      if (strategy == Strategy::full_shard) {
        EXPECT_EQ(sharded.state("layer0.weight"), ParameterState::sharded);
      }
    });
  }
}

TEST(Summon, OneRankAloneMaySummon) {
  comm::run_threads(2, [](const comm::Group& group) {
    Layers model = LayersTask::make(1), plain = LayersTask::make(1);
    auto sharded = fully_shard(*model, group, weights_only());
    {
      const at::NoGradGuard no_grad;
      model->forward(LayersTask::batch(0).input);
    }
    if (group.rank() == 1) {
      const auto guard = sharded.summon();
      EXPECT_EQ(*model->layers[3]->weight.data_ptr<float>(),
                *plain->layers[3]->weight.data_ptr<float>());
    }
    comm::barrier(group).wait();
  });
}

TEST(Summon, WritesBack) {
  for (const Strategy strategy : kStrategies) {
    for (const bool stepped : {false, true}) {
      SCOPED_TRACE(name_of(strategy));
      comm::run_threads(3, [&](const comm::Group& group) {
        Layers model = LayersTask::make(1), plain = LayersTask::make(1);
        auto sharded = fully_shard(*model, group, weights_only(strategy));
        torch::optim::SGD optimizer(sharded.parameters(), 0.1);
        torch::optim::SGD reference(plain->parameters(), 0.1);
        const auto step = [&] {
          optimizer.zero_grad();
          reference.zero_grad();
          backward(model, 0);
          backward(plain, 0);
          optimizer.step();
          reference.step();
        };
        if (stepped) step();
        const at::NoGradGuard no_grad;
        {
          const auto guard = sharded.summon({.write_back = true});
          model->layers[0]->weight.mul_(2);
          model->layers[1]->bias.fill_(0.25);
          for (int i = 0; i < 1024; ++i) model->layers[2]->weight.data_ptr<float>()[i] = 0.01F * i;
        }
        plain->layers[0]->weight.mul_(2);
        plain->layers[1]->bias.fill_(0.25);
        plain->layers[2]->weight.copy_(
            (at::arange(1024, at::kInt).to(at::kFloat) * 0.01F).view({32, 32}));
        const auto values = by_name(sharded.full_state_dict());
        for (const auto& item : plain->named_parameters()) {
          EXPECT_LT(distance(values.at(item.key()), item.value()), 1e-6) << item.key();
          EXPECT_LT(distance(model->named_parameters()[item.key()], item.value()), 1e-6);
        }
        const at::AutoGradMode on(true);
        step();
        for (const auto& item : plain->named_parameters())
          EXPECT_LT(distance(model->named_parameters()[item.key()], item.value()), 1e-5);
      });
    }
  }
}

TEST(Summon, WithoutWriteBackNothingChanges) {
  comm::run_threads(2, [](const comm::Group& group) {
    Layers model = LayersTask::make(1), plain = LayersTask::make(1);
    auto sharded = fully_shard(*model, group, weights_only());
    const at::NoGradGuard no_grad;
    {
      const auto guard = sharded.summon();
      EXPECT_THAT(error_of([&] { model->layers[1]->weight.zero_(); }), HasSubstr("layer1.weight"));
      model->layers[0]->weight.data_ptr<float>()[0] = 77;
    }
    for (size_t i = 0; i < 4; ++i)
      EXPECT_TRUE(at::equal(model->layers[i]->weight, plain->layers[i]->weight));
  });
}

TEST(Summon, SummonsMayBeNested) {
  comm::run_threads(2, [](const comm::Group& group) {
    Layers model = LayersTask::make(1);
    auto sharded = fully_shard(*model, group, weights_only());
    const at::NoGradGuard no_grad;
    {
      const auto outer = sharded.summon({.write_back = true});
      { const auto inner = sharded.summon(); }
      EXPECT_EQ(sharded.state("layer0.weight"), ParameterState::gathered);
      model->layers[0]->weight.fill_(3);
    }
    EXPECT_EQ(model->layers[0]->weight.mean().item<float>(), 3);
  });
}

// Weights that nobody wrote keep the bits that the narrow copy does not show.
TEST(Summon, WriteBackLeavesMastersAlone) {
  comm::run_threads(2, [](const comm::Group& group) {
    Layers model = LayersTask::make(1), plain = LayersTask::make(1);
    FullyShardOptions options = weights_only();
    options.mixed_precision.param = at::kBFloat16;
    auto sharded = fully_shard(*model, group, options);
    const at::NoGradGuard no_grad;
    {
      const auto guard = sharded.summon({.write_back = true});
      model->layers[0]->weight.fill_(3);
    }
    const auto values = by_name(sharded.full_state_dict());
    EXPECT_EQ(values.at("layer0.weight").min().item<float>(), 3);
    EXPECT_TRUE(at::equal(values.at("layer1.weight"), plain->layers[1]->weight));
  });
}

TEST(BeginUpdate, AllowsWritesToShards) {
  comm::run_threads(2, [](const comm::Group& group) {
    Layers model = LayersTask::make(1);
    auto sharded = fully_shard(*model, group, weights_only());
    const at::NoGradGuard no_grad;
    model->forward(LayersTask::batch(0).input);
    sharded.begin_update();
    for (const at::Tensor& shard : sharded.parameters()) shard.fill_(0.5);
    for (const at::Tensor& parameter : model->parameters())
      EXPECT_TRUE(parameter.eq(0.5).all().item<bool>());
  });
}

TEST(StateDict, WholeIsTheSameEverywhere) {
  for (const Strategy strategy : kStrategies) {
    comm::run_threads(3, [&](const comm::Group& group) {
      ConvNet model = ConvNetTask::make(static_cast<uint64_t>(1 + group.rank()));
      ConvNet plain = ConvNetTask::make(1);
      const auto sharded = fully_shard(*model, group, {.strategy = strategy, .min_num_params = 50});
      const auto values = sharded.full_state_dict();
      std::vector<std::string> names, expected;
      for (const auto& [name, tensor] : values) names.push_back(name);
      for (const auto& item : plain->named_parameters()) expected.push_back(item.key());
      for (const auto& item : plain->named_buffers()) expected.push_back(item.key());
      EXPECT_EQ(names, expected);
      const auto all = by_name(values);
      for (const auto& item : plain->named_parameters())
        EXPECT_TRUE(at::equal(all.at(item.key()), item.value())) << item.key();
      // They are copies.
      all.at("head.weight").zero_();
      EXPECT_GT(by_name(sharded.full_state_dict()).at("head.weight").abs().max().item<float>(), 0);
    });
  }
}

TEST(StateDict, PartsTileTheWhole) {
  for (const bool orig : {false, true}) {
    std::mutex mutex;
    std::map<std::string, at::Tensor> put_together, seen;
    ConvNet plain = ConvNetTask::make(1);
    comm::run_threads(3, [&](const comm::Group& group) {
      ConvNet model = ConvNetTask::make(1);
      const auto sharded =
          fully_shard(*model, group, {.min_num_params = 50, .use_orig_params = orig});
      const auto parts = sharded.sharded_state_dict();
      const std::lock_guard lock(mutex);
      const at::NoGradGuard no_grad;
      for (const auto& [placement, tensor] : parts) {
        placement.validate();
        EXPECT_EQ(tensor.sizes(), at::IntArrayRef(placement.local_shape())) << placement.describe();
        auto& whole = put_together[placement.name];
        auto& count = seen[placement.name];
        if (!whole.defined()) {
          whole = at::zeros(placement.global_shape, tensor.options());
          count = at::zeros(placement.global_shape);
        }
        const bool replicated = placement.is_whole();
        if (placement.is_empty() || (replicated && group.rank() != 0)) continue;
        at::Tensor target = whole, counted = count;
        for (int64_t dim = 0; dim < whole.dim(); ++dim) {
          const auto range = placement.slice.ranges[static_cast<size_t>(dim)];
          target = target.narrow(dim, range.begin, range.size());
          counted = counted.narrow(dim, range.begin, range.size());
        }
        target.copy_(tensor);
        counted.add_(1);
      }
    });
    for (const auto& item : plain->named_parameters()) {
      EXPECT_TRUE(at::equal(put_together.at(item.key()), item.value())) << item.key();
      EXPECT_TRUE(seen.at(item.key()).eq(1).all().item<bool>()) << item.key();
    }
    EXPECT_EQ(put_together.size(),
              plain->named_parameters().size() + plain->named_buffers().size());
  }
}

TEST(StateDict, PartsAreNotCopies) {
  comm::run_threads(2, [](const comm::Group& group) {
    Layers model;
    auto sharded = fully_shard(*model, group, weights_only());
    sharded.begin_update();
    const at::NoGradGuard no_grad;
    for (const auto& [placement, tensor] : sharded.sharded_state_dict()) tensor.fill_(2);
    for (const at::Tensor& parameter : model->parameters())
      EXPECT_TRUE(parameter.eq(2).all().item<bool>());
  });
}

TEST(StateDict, Loads) {
  for (const Strategy strategy : kStrategies) {
    comm::run_threads(3, [&](const comm::Group& group) {
      ConvNet from = ConvNetTask::make(5), model = ConvNetTask::make(1);
      {
        const at::NoGradGuard no_grad;
        for (at::Tensor& buffer : from->buffers()) buffer.add_(1);
      }
      const auto source = fully_shard(*from, group, {.min_num_params = 50});
      auto sharded = fully_shard(*model, group, {.strategy = strategy, .min_num_params = 50});
      const auto values = source.full_state_dict();
      {
        const at::NoGradGuard no_grad;  // the window is closed
        model->forward(ConvNetTask::batch(0).input);
      }
      sharded.load_full_state_dict(values);
      const auto expected = by_name(values);
      const at::NoGradGuard no_grad;
      for (const auto& item : model->named_parameters())
        EXPECT_TRUE(at::equal(item.value(), expected.at(item.key()))) << item.key();
      for (const auto& item : model->named_buffers())
        EXPECT_TRUE(at::equal(item.value(), expected.at(item.key()))) << item.key();
    });
  }
}

TEST(StateDict, WrongOnesWriteNothing) {
  comm::run_threads(2, [](const comm::Group& group) {
    Layers model = LayersTask::make(1), plain = LayersTask::make(1);
    auto sharded = fully_shard(*model, group, weights_only());
    auto values = sharded.full_state_dict();
    for (auto& [name, tensor] : values) tensor.zero_();
    auto missing = values, extra = values, shape = values;
    missing.pop_back();
    extra.push_back({"layer4.weight", at::zeros({32, 32})});
    shape.back().tensor = at::zeros({31});
    EXPECT_THAT(error_of([&] { sharded.load_full_state_dict(missing); }),
                HasSubstr("no value for 'layer3.bias'"));
    EXPECT_THAT(error_of([&] { sharded.load_full_state_dict(extra); }),
                HasSubstr("has no 'layer4.weight'"));
    EXPECT_THAT(error_of([&] { sharded.load_full_state_dict(shape); }),
                HasSubstr("'layer3.bias' is (31), must be (32)"));
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < 4; ++i)
      EXPECT_TRUE(at::equal(model->layers[i]->weight, plain->layers[i]->weight));
  });
}

// Optimizer state, named and placed as the parameters that it belongs to.
TEST(PartsOf, OptimizerStateIsPlacedAsItsParameters) {
  for (const bool orig : {false, true}) {
    std::mutex mutex;
    std::map<std::string, at::Tensor> put_together;
    Layers plain = LayersTask::make(1);
    backward(plain, 0);
    comm::run_threads(3, [&](const comm::Group& group) {
      Layers model = LayersTask::make(1);
      auto sharded = fully_shard(
          *model, group,
          {.units = parallel::OneUnit{}, .min_num_params = 100, .use_orig_params = orig});
      optim::AdamW optimizer(sharded.named_parameters());
      backward(model, 0);
      optimizer.step();
      const auto state = by_name(optimizer.state());
      const std::lock_guard lock(mutex);
      for (const auto& [name, tensor, parts] : sharded.named_parameters()) {
        const at::Tensor average = state.at(name + ".exp_avg");
        for (const auto& [placement, part] : sharded.parts_of(name, average)) {
          EXPECT_EQ(part.sizes(), at::IntArrayRef(placement.local_shape()));
          auto& whole = put_together[placement.name];
          if (!whole.defined()) whole = at::full(placement.global_shape, 99.0);
          if (placement.is_empty()) continue;
          at::Tensor target = whole;
          for (int64_t dim = 0; dim < whole.dim(); ++dim) {
            const auto range = placement.slice.ranges[static_cast<size_t>(dim)];
            target = target.narrow(dim, range.begin, range.size());
          }
          target.copy_(part);
        }
        const at::Tensor count = at::ones({});
        for (const auto& [placement, part] : sharded.parts_of(name, count)) {
          EXPECT_TRUE(placement.is_whole());
          EXPECT_TRUE(part.is_same(count));
        }
      }
      EXPECT_THAT(error_of([&] { sharded.parts_of("nothing", at::ones({})); }),
                  HasSubstr("no parameter 'nothing'"));
    });
    EXPECT_EQ(put_together.size(), 8u);
    for (const auto& item : plain->named_parameters())
      EXPECT_LT(distance(put_together.at(item.key()), item.value().grad() * 0.1), 1e-7);
  }
}

TEST(TrainingMode, TrainAndEvalReachTheModel) {
  comm::run_threads(2, [](const comm::Group& group) {
    ConvNet model = ConvNetTask::make(1);
    auto sharded = fully_shard(*model, group);
    EXPECT_TRUE(sharded.is_training());
    sharded.eval();
    EXPECT_FALSE(model->is_training() || sharded.is_training());
    sharded.train();
    EXPECT_TRUE(model->is_training());
    EXPECT_EQ(sharded.options().min_num_params, 1000);
  });
}

}  // namespace
}  // namespace lockstep::test
