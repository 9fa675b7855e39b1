// SPDX-License-Identifier: Apache-2.0
// Whatever writes a sharded model's values is seen by every rank, or refused by name.
#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>
#include <torch/utils.h>

#include <chrono>
#include <memory>
#include <optional>
#include <random>
#include <sstream>
#include <thread>

#include "lockstep/comm/collectives.h"
#include "lockstep/parallel/shard/sharded_model_state.h"
#include "tests/parallel/shard/support.h"
#include "tests/support/sampling.h"
#include "tests/support/says.h"

namespace lockstep::test {
namespace {

using parallel::fully_shard;
using parallel::FullyShardOptions;
using parallel::ParameterState;
using parallel::ShardedModel;
using testing::AllOf;
using testing::Each;
using testing::HasSubstr;

// Ranks come to a place at different times, in each round another one first.
class Delay {
 public:
  explicit Delay(const comm::Group& group)
      : random_(static_cast<unsigned>(17 * (1 + group.rank()))) {}
  void operator()() {
    std::this_thread::sleep_for(std::chrono::microseconds(random_() % 4 * (random_() % 400)));
  }

 private:
  std::mt19937 random_;
};

// While it lives, this thread's operators take long: a rank that is behind the others wherever it
// is.
class Slow {
 public:
  Slow()
      : handle_(at::addThreadLocalCallback(at::RecordFunctionCallback(
            [](const at::RecordFunction&) -> std::unique_ptr<at::ObserverContext> {
              std::this_thread::sleep_for(std::chrono::milliseconds(1));
              return nullptr;
            }))) {}
  ~Slow() { at::removeCallback(handle_); }
  Slow(const Slow&) = delete;
  Slow& operator=(const Slow&) = delete;

 private:
  at::CallbackHandle handle_;
};

int rounds() { return tests_all() ? 60 : 8; }

// Wide layers, so that a gather takes as long as a rank may be ahead.
class WideImpl : public torch::nn::Module {
 public:
  WideImpl() {
    for (int i = 0; i < 3; ++i)
      layers.push_back(
          register_module("layer" + std::to_string(i), torch::nn::Linear(kWidth, kWidth)));
    fill_parameters(*this, 1);
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) x = at::tanh(layer(x));
    return x;
  }
  static at::Tensor input() {
    return at::sin(at::arange(2 * kWidth, at::kFloat)).view({2, kWidth});
  }

  static constexpr int64_t kWidth = 384;
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Wide);

struct Form {
  std::string name;
  int ranks = 3;
  FullyShardOptions options = weights_only();
};

std::vector<Form> forms() {
  std::vector<Form> all;
  for (const Strategy strategy : kStrategies)
    all.push_back({std::string(name_of(strategy)), 3, weights_only(strategy)});
  all.push_back({"hybrid_shard", 4, weights_only(Strategy::hybrid_shard)});
  all.back().options.advanced.hybrid_group_size = 2;
  all.push_back({"keep_gathered_on_host"});
  all.back().options.advanced.keep_gathered_on_host = true;
  all.push_back({"use_orig_params"});
  all.back().options.use_orig_params = true;
  all.push_back({"double"});
  all.back().options.mixed_precision.param = at::kDouble;
  all.push_back({"double, whole", 3, weights_only(Strategy::optimizer)});
  all.back().options.mixed_precision.param = at::kDouble;
  return all;
}

// What writes do to a model, and to one in one process.
void change(torch::nn::Module& model, int round) {
  for (at::Tensor& parameter : model.parameters())
    parameter.mul_(1 - 0.01 * (1 + round % 3)).add_(0.001 * (1 + round % 2));
}

// Shards are of this type, whatever is computed in.
void round_to_float(torch::nn::Module& model) {
  for (at::Tensor& parameter : model.parameters()) parameter.copy_(parameter.to(at::kFloat));
}

void run_rounds(const Form& form,
                const std::function<void(int, Wide, ShardedModel&, Wide, Delay&)>& round) {
  comm::run_threads(form.ranks, [&](const comm::Group& group) {
    Wide model, plain;
    auto sharded = fully_shard(*model, group, form.options);
    if (form.options.mixed_precision.param) plain->to(at::kDouble);
    Delay delay(group);
    const at::Tensor x = WideImpl::input();
    const at::Tensor same = x.to(plain->parameters()[0].scalar_type());
    for (int i = 0; i < rounds(); ++i) {
      round(i, model, sharded, plain, delay);
      delay();
      const at::NoGradGuard no_grad;
      EXPECT_TRUE(at::equal(model->forward(x), plain->forward(same)))
          << form.name << ", round " << i;
      if (i % 2 == 0) continue;
      for (const auto& item : plain->named_parameters())
        EXPECT_TRUE(at::equal(model->named_parameters()[item.key()], item.value()))
            << form.name << ", " << item.key();
    }
  });
}

TEST(ShardWrites, UnderSummonReachAllRanks) {
  for (const Form& form : forms()) {
    run_rounds(form, [](int round, Wide model, ShardedModel& sharded, Wide plain, Delay& delay) {
      const comm::Group& group = sharded.shared()->engine->groups().all;
      const at::NoGradGuard no_grad;
      delay();
      std::optional<Slow> slow;
      if (group.rank() == round % group.size()) slow.emplace();
      {
        const auto guard = sharded.summon({.write_back = true});
        slow.reset();
        if (round % 3 == 1) model->forward(WideImpl::input());
        change(*model, round);
      }
      change(*plain, round);
      round_to_float(*plain);
      if (round % 4 == 3) {
        delay();
        const auto guard = sharded.summon();
        const auto values = model->layers[1]->weight;
        EXPECT_EQ(std::memcmp(values.data_ptr(), plain->layers[1]->weight.data_ptr(),
                              plain->layers[1]->weight.nbytes()),
                  0);
      }
    });
  }
}

TEST(ShardWrites, ToShardsReachAllRanks) {
  for (const Form& form : forms()) {
    run_rounds(form, [](int round, Wide, ShardedModel& sharded, Wide plain, Delay& delay) {
      const at::NoGradGuard no_grad;
      delay();
      sharded.begin_update();
      if (round % 2 == 0) {
        for (const at::Tensor& shard : sharded.parameters()) shard.fill_(0.01 * (1 + round));
      } else {
        for (const auto& [placement, part] : sharded.sharded_state_dict())
          part.fill_(0.01 * (1 + round));
      }
      for (at::Tensor& parameter : plain->parameters()) parameter.fill_(0.01 * (1 + round));
      round_to_float(*plain);
    });
  }
}

// ---- summons inside others, and what must not be in them ----

TEST(ShardWrites, SummonsInsideEachOther) {
  comm::run_threads(2, [](const comm::Group& group) {
    Layers model = LayersTask::make(1);
    auto sharded = fully_shard(*model, group, weights_only());
    const at::NoGradGuard no_grad;
    {
      const auto reading = sharded.summon();
      const float* const memory = model->layers[0]->weight.data_ptr<float>();
      const auto outer = sharded.summon({.write_back = true});
      model->layers[0]->weight.fill_(3);
      {
        const auto inner = sharded.summon({.write_back = true});
        model->layers[1]->weight.fill_(4);
        EXPECT_EQ(memory[0], 3) << "gathered once";
      }
      EXPECT_EQ(model->layers[0]->weight.mean().item<float>(), 3);
      model->layers[2]->weight.fill_(5);
      sharded.reshard();  // of unshard(), not of summon()
      EXPECT_EQ(sharded.state("layer2.weight"), ParameterState::gathered);
    }
    for (const size_t i : {0, 1, 2})
      EXPECT_EQ(model->layers[i]->weight.mean().item<float>(), 3.0F + static_cast<float>(i));
    EXPECT_EQ(sharded.state("layer0.weight"), ParameterState::sharded);
  });
}

TEST(ShardWrites, AnExceptionUnderSummonEndsIt) {
  comm::run_threads(3, [](const comm::Group& group) {
    Layers model = LayersTask::make(1);
    auto sharded = fully_shard(*model, group, weights_only());
    const at::NoGradGuard no_grad;
    EXPECT_THAT(error_of([&] {
                  const auto guard = sharded.summon({.write_back = true});
                  model->layers[0]->weight.fill_(3);
                  throw Error("enough");
                }),
                HasSubstr("enough"));
    EXPECT_EQ(model->layers[0]->weight.mean().item<float>(), 3);
    EXPECT_THAT(error_of([&] { model->layers[0]->weight.fill_(4); }), HasSubstr("layer0.weight"));
  });
}

TEST(ShardWrites, ABackwardUnderSummonLeavesGradients) {
  comm::run_threads(2, [](const comm::Group& group) {
    Layers model = LayersTask::make(1), plain = LayersTask::make(1);
    auto sharded = fully_shard(*model, group, weights_only());
    torch::optim::SGD optimizer(sharded.parameters(), 0.5);
    torch::optim::SGD reference(plain->parameters(), 0.5);
    {
      const auto guard = sharded.summon({.write_back = true});
      const auto change = [](Layers layers) {
        const at::NoGradGuard no_grad;
        layers->layers[1]->weight.mul_(0.5);
      };
      change(model);
      change(plain);
      backward(model, 0);
      backward(plain, 0);
      EXPECT_THAT(error_of([&] { optimizer.step(); }),
                  AllOf(HasSubstr("shard of parameter layer0.weight"), HasSubstr("write_back")));
      EXPECT_THAT(error_of([&] { sharded.begin_update(); }), HasSubstr("write_back"));
    }
    optimizer.step();
    reference.step();
    for (size_t i = 0; i < 4; ++i)
      EXPECT_LT(distance(model->layers[i]->weight, plain->layers[i]->weight), 1e-6) << i;
  });
}

// ---- at other times ----

// What a sharded model is used by, after which its shards are closed.
void evaluate(Layers model) {
  const at::NoGradGuard no_grad;
  model->forward(LayersTask::batch(0).input);
}

TEST(ShardWrites, ToClosedShardsAreRefusedByName) {
  for (const bool frozen : {false, true}) {
    const auto errors = errors_of(2, [&](const comm::Group& group) {
      Layers model;
      model->layers[2]->weight.set_requires_grad(!frozen);
      auto sharded = fully_shard(*model, group, weights_only());
      evaluate(model);
      const at::NoGradGuard no_grad;
      for (const auto& [placement, part] : sharded.sharded_state_dict()) {
        if (placement.name == "layer2.weight") part.copy_(at::zeros_like(part));
      }
    });
    EXPECT_THAT(errors, Each(AllOf(says("shard of parameter layer2.weight ... written"),
                                   HasSubstr("begin_update()"))));
  }
}

// Through pointers they are noticed by the next use, evaluation or window.
TEST(ShardWrites, ThroughPointersAreRefusedByName) {
  for (const int use : {0, 1, 2, 3}) {
    const auto errors = errors_of(2, [&](const comm::Group& group) {
      Layers model;
      auto sharded = fully_shard(*model, group, weights_only());
      at::Tensor loss;
      if (use == 1) loss = model->forward(LayersTask::batch(0).input).sum();
      evaluate(model);
      for (const auto& [placement, part] : sharded.sharded_state_dict()) {
        if (placement.name != "layer1.weight") continue;
        for (int64_t i = 0; i < part.numel(); ++i) part.data_ptr<float>()[i] = 7;
      }
      if (use == 0) evaluate(model);
      if (use == 1) loss.backward();
      if (use == 2) sharded.begin_update();
      if (use == 3) const auto guard = sharded.summon({.write_back = true});
    });
    EXPECT_THAT(errors, Each(AllOf(HasSubstr("shard of parameter layer1.weight was written"),
                                   HasSubstr("data_ptr()"))))
        << use;
  }
}

// In the window they may be written in any way.
TEST(ShardWrites, ThroughPointersInTheWindow) {
  comm::run_threads(2, [](const comm::Group& group) {
    Layers model;
    auto sharded = fully_shard(*model, group, weights_only());
    backward(model, 0);
    for (const auto& [placement, part] : sharded.sharded_state_dict()) {
      for (int64_t i = 0; i < part.numel(); ++i) part.data_ptr<float>()[i] = 7;
    }
    const at::NoGradGuard no_grad;
    for (const at::Tensor& parameter : model->parameters())
      EXPECT_TRUE(parameter.eq(7).all().item<bool>());
    evaluate(model);
  });
}

// As torch does for parameters that are not sharded.
TEST(ShardWrites, AGraphFromBeforeAWriteIsRefused) {
  comm::run_threads(2, [](const comm::Group& group) {
    for (const Strategy strategy : kStrategies) {
      for (const bool summons : {false, true}) {
        Layers model;
        auto sharded = fully_shard(*model, group, weights_only(strategy));
        const Batch batch = LayersTask::batch(0);
        const at::Tensor loss = LayersTask::loss(model->forward(batch.input), batch);
        {
          const at::NoGradGuard no_grad;
          if (summons) {
            const auto guard = sharded.summon({.write_back = true});
            for (at::Tensor& parameter : model->parameters()) parameter.mul_(2);
          } else {
            sharded.begin_update();
            for (const at::Tensor& shard : sharded.parameters()) shard.mul_(2);
          }
        }
        EXPECT_THROW(loss.backward(), c10::Error) << name_of(strategy);
      }
    }
  });
}

// Two graphs of which nothing was written between: no reason to refuse.
TEST(ShardWrites, TwoGraphsOneAfterTheOther) {
  comm::run_threads(2, [](const comm::Group& group) {
    Layers model = LayersTask::make(1), plain = LayersTask::make(1);
    auto sharded = fully_shard(*model, group, weights_only());
    for (Layers& each : {std::ref(model), std::ref(plain)}) {
      const Batch a = LayersTask::batch(0), b = LayersTask::batch(1);
      const at::Tensor first = LayersTask::loss(each->forward(a.input), a);
      const at::Tensor second = LayersTask::loss(each->forward(b.input), b);
      first.backward();
      second.backward();
    }
    torch::optim::SGD(sharded.parameters(), 0.5).step();
    torch::optim::SGD(plain->parameters(), 0.5).step();
    for (size_t i = 0; i < 4; ++i)
      EXPECT_LT(distance(model->layers[i]->weight, plain->layers[i]->weight), 1e-6) << i;
  });
}

TEST(ShardWrites, ByTorchLoadAreRefusedByName) {
  std::ostringstream file;
  torch::save(Layers(), file);
  const auto errors = errors_of(2, [&](const comm::Group& group) {
    Layers model;
    auto sharded = fully_shard(*model, group, weights_only());
    evaluate(model);
    std::istringstream in(file.str());
    torch::load(model, in);
  });
  EXPECT_THAT(errors, Each(HasSubstr("parameter layer0.weight")));
}

// A caller who catches the error is told again.
TEST(ShardWrites, AReplacedParameterStaysRefused) {
  const auto errors = errors_of(2, [&](const comm::Group& group) {
    Layers model;
    auto sharded = fully_shard(*model, group, weights_only());
    evaluate(model);
    model->layers[1]->weight.set_data(at::zeros({32, 32}));
    for (int time = 0; time < 2; ++time)
      EXPECT_THAT(error_of([&] { evaluate(model); }), HasSubstr("parameter layer1.weight is"));
    sharded.full_state_dict();
  });
  EXPECT_THAT(errors, Each(HasSubstr("parameter layer1.weight is")));
}

// ---- what was fetched and not used ----

// Parameters that stay whole are fetched all at once after each step. One that is not used until a
// later step must not have the values of the first.
TEST(ShardWrites, ReachWhatWasFetchedAndNotUsed) {
  for (const Strategy strategy : kStrategies) {
    comm::run_threads(3, [&](const comm::Group& group) {
      Layers model = LayersTask::make(1), plain = LayersTask::make(1);
      auto sharded = fully_shard(*model, group, weights_only(strategy));
      const at::NoGradGuard no_grad;
      for (int round = 0; round < 3; ++round) {
        model->layers[0](LayersTask::batch(0).input);
        sharded.begin_update();
        for (const at::Tensor& shard : sharded.parameters()) shard.mul_(0.5);
        for (at::Tensor& parameter : plain->parameters()) parameter.mul_(0.5);
      }
      for (size_t i = 0; i < 4; ++i)
        EXPECT_TRUE(at::equal(model->layers[i]->weight, plain->layers[i]->weight))
            << name_of(strategy) << ", layer " << i;
    });
  }
}

}  // namespace
}  // namespace lockstep::test
