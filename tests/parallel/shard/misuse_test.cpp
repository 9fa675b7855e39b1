// SPDX-License-Identifier: Apache-2.0
// What must not be done to a sharded model, and what it says then.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/init.h>
#include <torch/nn/utils.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <memory>
#include <optional>

#include "lockstep/comm/collectives.h"
#include "lockstep/optim/adamw.h"
#include "lockstep/optim/sgd.h"
#include "tests/parallel/shard/support.h"
#include "tests/support/says.h"

namespace lockstep::test {
namespace {

using parallel::fully_shard;
using parallel::FullyShardOptions;
using parallel::ShardedModel;
using testing::AllOf;
using testing::Each;
using testing::HasSubstr;
using testing::IsEmpty;

at::Tensor loss_of_layers(Layers model, int64_t index = 0) {
  const Batch batch = LayersTask::batch(index);
  return LayersTask::loss(model->forward(batch.input), batch);
}

// A model over two ranks, and what they throw.
using Body = std::function<void(const comm::Group&, Layers, std::optional<ShardedModel>&)>;
std::vector<std::string> errors_with_model(const Body& body,
                                           const FullyShardOptions& options = weights_only()) {
  return errors_of(2, [&](const comm::Group& group) {
    Layers model;
    std::optional<ShardedModel> sharded = fully_shard(*model, group, options);
    body(group, model, sharded);
  });
}

// ---- writes into copies ----

TEST(GatheredParameterWrites, AreRefusedByName) {
  const std::vector<std::function<void(at::Tensor&)>> writes{
      [](at::Tensor& p) { p.add_(1); },
      [](at::Tensor& p) { p.clamp_(-1, 1); },
      [](at::Tensor& p) { torch::nn::init::normal_(p); },
      [](at::Tensor& p) { torch::nn::init::xavier_uniform_(p); },
      [](at::Tensor& p) {
        p.data().copy_(at::zeros({32, 32}));
      },
      [](at::Tensor& p) { p.detach().zero_(); },
      [](at::Tensor& p) { p.t().narrow(0, 0, 1).fill_(1); },
      [](at::Tensor& p) { p[3][4] = 1; },
      [](at::Tensor& p) {
        at::add_out(p, at::ones({32, 32}), at::ones({32, 32}));
      },
      [](at::Tensor& p) { p.index_put_({torch::indexing::Slice(0, 2)}, 3); }};
  for (size_t i = 0; i < writes.size(); ++i) {
    SCOPED_TRACE(i);
    EXPECT_THAT(errors_with_model([&](const comm::Group&, Layers model, auto&) {
                  const at::NoGradGuard no_grad;
                  writes[i](model->layers[2]->weight);
                }),
                Each(AllOf(HasSubstr("writes into parameter layer2.weight"),
                           HasSubstr("summon({.write_back = true})"))));
  }
}

TEST(GatheredParameterWrites, AreRefusedOutsideNoGradToo) {
  EXPECT_THAT(errors_with_model([](const comm::Group&, Layers model, auto&) {
                loss_of_layers(model).backward();
                model->layers[1]->weight.mul_(2);
              }),
              Each(HasSubstr("aten::mul_ writes into parameter layer1.weight")));
}

// ---- frozen parameters ----

TEST(FrozenParameters, UnfrozenAfterShardingAreNamed) {
  for (const Strategy strategy : kStrategies) {
    EXPECT_THAT(errors_of(2,
                          [&](const comm::Group& group) {
                            Layers model;
                            model->layers[1]->weight.set_requires_grad(false);
                            auto sharded = fully_shard(*model, group, weights_only(strategy));
                            loss_of_layers(model).backward();
                            model->layers[1]->weight.set_requires_grad(true);
                            loss_of_layers(model).backward();
                          }),
                Each(HasSubstr("parameter layer1.weight is trained, but was frozen")));
  }
}

TEST(FrozenParameters, FrozenAfterShardingAreNamedInFlatUnits) {
  for (const bool orig : {false, true}) {
    const auto errors = errors_with_model(
        [](const comm::Group&, Layers model, auto&) {
          loss_of_layers(model).backward();
          model->layers[1]->weight.set_requires_grad(false);
          loss_of_layers(model).backward();
        },
        {.units = parallel::OneUnit{}, .min_num_params = 100, .use_orig_params = orig});
    if (orig) {
      EXPECT_THAT(errors, Each(IsEmpty()));
    } else {
      EXPECT_THAT(errors, Each(HasSubstr("parameter layer1.weight was frozen after")));
    }
  }
}

// ---- replaced parameters ----

TEST(ReplacedParameters, ConvertingTheModelIsRefused) {
  EXPECT_THAT(errors_with_model([](const comm::Group&, Layers model, auto&) {
                model->to(torch::kDouble);
                loss_of_layers(model);
              }),
              Each(AllOf(HasSubstr("parameter layer0.weight is (32, 32) Double"),
                         says("moved or converted"))));
}

// Also where it is the only parameter that was converted, at whatever time.
TEST(ReplacedParameters, ConvertingOneModuleIsRefused) {
  for (const bool trained : {false, true}) {
    EXPECT_THAT(errors_with_model(
                    [&](const comm::Group&, Layers model, std::optional<ShardedModel>& sharded) {
                      torch::optim::SGD optimizer(sharded->parameters(), 0.1);
                      if (trained) {
                        loss_of_layers(model).backward();
                        optimizer.step();
                      }
                      model->layers[2]->to(torch::kHalf);
                      const Batch batch = LayersTask::batch(0);
                      model->layers[3](model->layers[1](batch.input));
                    }),
                Each(HasSubstr("parameter layer2.weight is (32, 32) Half")));
  }
}

TEST(ReplacedParameters, SetDataIsRefused) {
  for (const bool trained : {false, true}) {
    EXPECT_THAT(errors_with_model(
                    [&](const comm::Group&, Layers model, std::optional<ShardedModel>& sharded) {
                      torch::optim::SGD optimizer(sharded->parameters(), 0.1);
                      if (trained) {
                        loss_of_layers(model).backward();
                        optimizer.step();
                      }
                      model->layers[1]->weight.set_data(at::zeros({16, 32}));
                      loss_of_layers(model);
                    }),
                Each(HasSubstr("parameter layer1.weight is (16, 32) Float")));
  }
}

// ---- steps ----

TEST(OptimizerSteps, OverTheModelsParametersAreRefused) {
  const auto parameters = [](Layers model) { return model->parameters(); };
  const std::vector<std::function<void(Layers)>> steps{
      [&](Layers m) { torch::optim::SGD(parameters(m), 0.1).step(); },
      [&](Layers m) {
        torch::optim::SGD(parameters(m), torch::optim::SGDOptions(0.1).momentum(0.9)).step();
      },
      [&](Layers m) { torch::optim::AdamW(parameters(m)).step(); },
      [&](Layers m) { torch::optim::Adam(parameters(m)).step(); },
      [&](Layers m) { torch::optim::Adagrad(parameters(m)).step(); },
      [&](Layers m) { torch::optim::RMSprop(parameters(m)).step(); },
      [&](Layers m) { optim::AdamW(*m).step(); },
      [&](Layers m) { optim::SGD(*m).step(); },
      [&](Layers m) { torch::nn::utils::clip_grad_norm_(parameters(m), 1.0); },
      [&](Layers m) { optim::clip_grad_norm_(parameters(m), 1.0); }};
  for (size_t i = 0; i < steps.size(); ++i) {
    SCOPED_TRACE(i);
    for (const Strategy strategy : {Strategy::full_shard, Strategy::shard_grad_op}) {
      EXPECT_THAT(errors_with_model(
                      [&](const comm::Group&, Layers model, auto&) {
                        loss_of_layers(model).backward();
                        steps[i](model);
                      },
                      weights_only(strategy)),
                  Each(HasSubstr("parameter layer0.weight")));
    }
  }
}

// With these the model's parameters have whole gradients: looking at them is right, stepping not.
TEST(OptimizerSteps, OverTheModelsParametersWithWholeGradientsAreRefused) {
  EXPECT_THAT(errors_with_model(
                  [](const comm::Group&, Layers model, auto&) {
                    loss_of_layers(model).backward();
                    EXPECT_GT(optim::grad_norm(model->parameters()), 0);
                    torch::optim::AdamW(model->parameters()).step();
                  },
                  weights_only(Strategy::optimizer)),
              Each(HasSubstr("writes into parameter layer0.weight")));
  EXPECT_THAT(errors_with_model(
                  [](const comm::Group&, Layers model, auto&) {
                    loss_of_layers(model).backward();
                    torch::optim::AdamW(model->parameters()).step();
                  },
                  weights_only(Strategy::no_shard)),
              Each(IsEmpty()))
      << "nothing is sharded: they are the parameters";
}

TEST(OptimizerSteps, BetweenForwardAndBackwardAreRefused) {
  for (const Strategy strategy :
       {Strategy::full_shard, Strategy::shard_grad_op, Strategy::optimizer}) {
    for (const bool ours : {false, true}) {
      EXPECT_THAT(errors_with_model(
                      [&](const comm::Group&, Layers model, std::optional<ShardedModel>& sharded) {
                        loss_of_layers(model).backward();
                        const at::Tensor loss = loss_of_layers(model, 1);
                        if (ours) {
                          optim::SGD(sharded->named_parameters()).step();
                        } else {
                          torch::optim::SGD(sharded->parameters(), 0.1).step();
                        }
                        loss.backward();
                      },
                      weights_only(strategy)),
                  Each(AllOf(says("shard of parameter layer0.weight ... written"),
                             HasSubstr("begin_update()"))));
    }
  }
}

TEST(OptimizerSteps, AfterAnUnreducedBackwardAreRefused) {
  for (const bool zeroed : {false, true}) {
    for (const bool ours : {false, true}) {
      EXPECT_THAT(errors_with_model(
                      [&](const comm::Group&, Layers model, std::optional<ShardedModel>& sharded) {
                        torch::optim::SGD theirs(sharded->parameters(), 0.1);
                        optim::SGD own(sharded->named_parameters());
                        const auto step = [&] { ours ? own.step() : void(theirs.step()); };
                        loss_of_layers(model).backward();
                        step();
                        if (zeroed) own.zero_grad();
                        const auto guard = sharded->no_sync();
                        loss_of_layers(model).backward();
                        step();
                      }),
                  Each(HasSubstr("parameter layer0.weight")))
          << zeroed << ours;
    }
  }
}

TEST(OptimizerSteps, OnUnreducedGradientsAfterBeginUpdateAreRefused) {
  for (const bool ours : {false, true}) {
    EXPECT_THAT(
        errors_with_model(
            [&](const comm::Group&, Layers model, std::optional<ShardedModel>& sharded) {
              const auto guard = sharded->no_sync();
              loss_of_layers(model).backward();
              sharded->begin_update();
              if (ours) {
                optim::SGD(sharded->named_parameters()).step();
              } else {
                torch::optim::SGD(sharded->parameters(), 0.1).step();
              }
            }),
        Each(AllOf(says("gradient ... shard of parameter layer0.weight"), HasSubstr("no_sync()"))));
    EXPECT_THAT(errors_with_model(
                    [&](const comm::Group&, Layers model, std::optional<ShardedModel>& sharded) {
                      const auto guard = sharded->no_sync();
                      loss_of_layers(model).backward();
                      sharded->clip_grad_norm_(1);
                    }),
                Each(says("gradient ... shard of parameter layer0.weight")));
  }
}

TEST(OptimizerSteps, UnderNoSyncAreAllowedWithShardedGradients) {
  FullyShardOptions options = weights_only();
  options.no_sync = parallel::NoSyncGradients::sharded;
  EXPECT_THAT(errors_with_model(
                  [](const comm::Group&, Layers model, std::optional<ShardedModel>& sharded) {
                    const auto guard = sharded->no_sync();
                    loss_of_layers(model).backward();
                    torch::optim::SGD(sharded->parameters(), 0.1).step();
                    loss_of_layers(model).backward();
                  },
                  options),
              Each(IsEmpty()));
}

// The rank that read is the one that is told.
TEST(OptimizerSteps, AfterAReadOnOneRankAreRefusedThere) {
  const auto errors = errors_of(2, [](const comm::Group& group) {
    Layers model;
    auto sharded = fully_shard(*model, group, weights_only());
    torch::optim::SGD optimizer(sharded.parameters(), 0.1);
    loss_of_layers(model).backward();
    std::string error;
    if (group.rank() == 1) {
      const at::NoGradGuard no_grad;
      model->layers[0]->weight.sum();  // waits until all ranks use parameters again
      error = error_of([&] { optimizer.step(); });
    } else {
      optimizer.step();
      const at::NoGradGuard no_grad;
      model->layers[0]->weight.sum();
    }
    comm::barrier(group).wait();
    if (!error.empty()) throw Error(error);
  });
  EXPECT_THAT(errors[0], IsEmpty());
  EXPECT_THAT(errors[1],
              AllOf(says("shard of parameter layer0.weight ... written"), says("used since")));
}

// ---- lifetime ----

TEST(DestroyedHandle, UseOfTheModelAfterwardsIsRefused) {
  EXPECT_THAT(
      errors_with_model([](const comm::Group&, Layers model, std::optional<ShardedModel>& sharded) {
        loss_of_layers(model).backward();
        const ShardedModel copy = *sharded;
        sharded.reset();
        loss_of_layers(model);  // the copy holds it
      }),
      Each(IsEmpty()));
  EXPECT_THAT(
      errors_with_model([](const comm::Group&, Layers model, std::optional<ShardedModel>& sharded) {
        loss_of_layers(model).backward();
        sharded.reset();
        loss_of_layers(model);
      }),
      Each(AllOf(HasSubstr("parameter layer0.weight is used"), says("is gone"))));
}

TEST(DestroyedHandle, BetweenForwardAndBackwardIsRefused) {
  EXPECT_THAT(
      errors_with_model([](const comm::Group&, Layers model, std::optional<ShardedModel>& sharded) {
        const at::Tensor loss = loss_of_layers(model);
        sharded.reset();
        loss.backward();
      }),
      Each(HasSubstr("parameter layer3.weight is used")));
}

TEST(DestroyedHandle, ShardsOfTheOptimizerStayValid) {
  EXPECT_THAT(
      errors_with_model([](const comm::Group&, Layers model, std::optional<ShardedModel>& sharded) {
        torch::optim::SGD optimizer(sharded->parameters(), 0.1);
        const std::vector<at::Tensor> shards = sharded->parameters();
        loss_of_layers(model).backward();
        sharded.reset();
        optimizer.step();
        const at::NoGradGuard no_grad;
        for (const at::Tensor& shard : shards) EXPECT_TRUE(at::isfinite(shard).all().item<bool>());
        model->zero_grad();
      }),
      Each(IsEmpty()));
}

TEST(DestroyedHandle, TheModelMayBeDestroyedFirst) {
  EXPECT_THAT(errors_of(2,
                        [](const comm::Group& group) {
                          std::optional<Layers> model(std::in_place);
                          auto sharded = fully_shard(**model, group, weights_only());
                          loss_of_layers(*model).backward();
                          model.reset();
                          EXPECT_EQ(sharded.full_state_dict().size(), 8u);
                        }),
              Each(IsEmpty()));
}

// ---- exceptions of the user's ----

struct Stop : std::runtime_error {
  Stop() : std::runtime_error("stop") {}
};

// Everybody stops at the same place, and goes on as if nothing had been.
TEST(ExceptionsInAShardedModel, OnAllRanksLeaveTrainingUnchanged) {
  for (const Strategy strategy :
       {Strategy::full_shard, Strategy::shard_grad_op, Strategy::optimizer, Strategy::no_shard}) {
    for (const bool in_backward : {false, true}) {
      SCOPED_TRACE(name_of(strategy));
      EXPECT_THAT(errors_of(2,
                            [&](const comm::Group& group) {
                              Layers model = LayersTask::make(1), plain = LayersTask::make(1);
                              auto sharded = fully_shard(*model, group, weights_only(strategy));
                              torch::optim::SGD optimizer(sharded.parameters(), 0.1);
                              torch::optim::SGD reference(plain->parameters(), 0.1);
                              for (int step = 0; step < 4; ++step) {
                                if (step % 2 == 1) {
                                  model->probe = [&](size_t layer, bool back) {
                                    if (layer == 1 && back == in_backward) throw Stop();
                                  };
                                  EXPECT_THROW(loss_of_layers(model, 7).backward(), Stop);
                                  model->probe = nullptr;
                                }
                                optimizer.zero_grad();
                                for (const at::Tensor& p : sharded.parameters())
                                  p.mutable_grad().reset();
                                model->zero_grad();
                                reference.zero_grad();
                                loss_of_layers(model, step).backward();
                                loss_of_layers(plain, step).backward();
                                optimizer.step();
                                reference.step();
                              }
                              const auto values = by_name(sharded.full_state_dict());
                              for (const auto& item : plain->named_parameters())
                                EXPECT_LT(distance(values.at(item.key()), item.value()), 1e-6)
                                    << item.key();
                            }),
                  Each(IsEmpty()));
    }
  }
}

// Nobody waits for the dead, whatever was under way.
class OneRankFails : public testing::TestWithParam<std::string> {};

TEST_P(OneRankFails, TheOtherRanksDoNotHang) {
  for (const bool in_backward : {false, true}) {
    for (const int known : {0, 2}) {
      EXPECT_THROW(comm::run_threads(2,
                                     [&](const comm::Group& group) {
                                       Layers model;
                                       auto sharded = fully_shard(*model, group, weights_only());
                                       for (int i = 0; i < known; ++i)
                                         loss_of_layers(model).backward();
                                       if (group.rank() == 1) {
                                         model->probe = [&](size_t layer, bool back) {
                                           if (layer == 2 && back == in_backward) throw Stop();
                                         };
                                       }
                                       loss_of_layers(model).backward();
                                       loss_of_layers(model).backward();
                                     },
                                     {.backend = GetParam(), .timeout = milliseconds{5000}}),
                   std::exception);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, OneRankFails, testing::Values("thread", "shm", "gloo"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace lockstep::test
