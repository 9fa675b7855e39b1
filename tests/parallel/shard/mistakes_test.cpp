// SPDX-License-Identifier: Apache-2.0
// Mistakes of a first port, each on one rank, where that is possible, and on two: what they say.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cstdlib>

#include "lockstep/comm/collectives.h"
#include "lockstep/optim/adamw.h"
#include "lockstep/optim/clip.h"
#include "lockstep/parallel/data/ddp.h"
#include "tests/parallel/shard/pair.h"
#include "tests/parallel/shard/support.h"

namespace lockstep::test {
namespace {

using parallel::fully_shard;
using testing::AllOf;
using testing::Each;
using testing::HasSubstr;
using testing::IsEmpty;

// While one is alive, a group of one follows the rules of several.
struct Rehearsal {
  Rehearsal() { setenv("LOCKSTEP_REHEARSE", "1", 1); }
  ~Rehearsal() { unsetenv("LOCKSTEP_REHEARSE"); }
};

// ---- units ----

TEST(FirstMistakes, UnitsOfAnUnknownType) {
  for (const int ranks : {1, 2}) {
    EXPECT_THAT(errors_of(ranks,
                          [](const comm::Group& group) {
                            fully_shard(*Layers(), group, {.units = parallel::ByType{{"Linaer"}}});
                          }),
                Each(AllOf(HasSubstr("'Linaer'"), HasSubstr("torch::nn::LinearImpl"))));
  }
}

// ---- optimizers ----

TEST(FirstMistakes, AnOptimizerOfTheModelsParameters) {
  const Rehearsal rehearsal;
  for (const int ranks : {1, 2}) {
    for (const bool before : {false, true}) {
      for (const Strategy strategy : {Strategy::full_shard, Strategy::optimizer}) {
        EXPECT_THAT(errors_of(ranks,
                              [&](const comm::Group& group) {
                                Layers model;
                                auto parameters = model->parameters();
                                const auto sharded =
                                    fully_shard(*model, group, weights_only(strategy));
                                if (!before) parameters = model->parameters();
                                torch::optim::AdamW optimizer(parameters);
                                backward(model, 0);
                                optimizer.step();
                              }),
                    Each(AllOf(HasSubstr("parameter layer0.weight"), HasSubstr("optimizer"),
                               HasSubstr("parameters() of what fully_shard returned"))))
            << ranks << before;
      }
    }
  }
}

TEST(Rehearsal, TrainsAsWithoutIt) {
  const Rehearsal rehearsal;
  Pair pair(comm::Group(),
            {"drop", {.units = parallel::ByType{{"Linear"}}, .min_num_params = 1}, true});
  for (int step = 0; step < 3; ++step)
    pair.step([&](Net& net) { return loss_of(net.forward(input_of(step))); });
  EXPECT_EQ(pair.sharded.units(), (std::vector<std::string>{"model", "a", "b", "spare"}));
}

TEST(Rehearsal, OtherWordsAreRefused) {
  setenv("LOCKSTEP_REHEARSE", "yes", 1);
  EXPECT_THAT(error_of([] { fully_shard(*Layers(), comm::Group()); }),
              AllOf(HasSubstr("LOCKSTEP_REHEARSE"), HasSubstr("'yes'")));
  unsetenv("LOCKSTEP_REHEARSE");
}

// ---- unused parameters ----

TEST(FirstMistakes, UnusedParametersOfDdp) {
  for (const int ranks : {1, 2}) {
    const auto train = [&](const parallel::DdpOptions& options) {
      return errors_of(ranks, [&](const comm::Group& group) {
        auto ddp = parallel::ddp(std::make_shared<Net>(), group, options);
        ddp.module()->table->weight.set_requires_grad(true);
        for (int step = 0; step < 2; ++step) ddp.forward(input_of(step)).sum().backward();
      });
    };
    EXPECT_THAT(train({}), Each(AllOf(HasSubstr("spare.weight got no gradient"),
                                      HasSubstr("find_unused_parameters"))));
    EXPECT_THAT(train({.find_unused_parameters = true}), Each(IsEmpty()));
  }
}

// Gradients of several micro-batches count together, and what was cleared does not.
TEST(FirstMistakes, UnusedParametersOfSomeMicroBatches) {
  for (const int ranks : {1, 2}) {
    const auto run = [&](const auto& body) {
      return errors_of(ranks, [&](const comm::Group& group) {
        auto ddp = parallel::ddp(Layers(2), group);
        body(ddp, [&](std::vector<size_t> order) {
          ddp.module()->order = std::move(order);
          const Batch batch = LayersTask::batch(0);
          LayersTask::loss(ddp.forward(batch.input), batch).backward();
        });
      });
    };
    EXPECT_THAT(run([](auto& ddp, const auto& use) {
                  {
                    const auto quiet = ddp.no_sync();
                    use({0});
                  }
                  use({1});
                  ddp.zero_grad();
                  use({0, 1});
                }),
                Each(IsEmpty()));
    EXPECT_THAT(run([](auto& ddp, const auto& use) {
                  {
                    const auto quiet = ddp.no_sync();
                    use({0});
                  }
                  ddp.zero_grad();
                  use({1});
                }),
                Each(HasSubstr("layer0.weight got no gradient")));
  }
}

// ---- clipping ----

using Clip = std::function<void(const comm::Group&, const parallel::ShardedModel&)>;
std::vector<std::string> errors_of_clipping(const Clip& clip,
                                            const parallel::FullyShardOptions& options) {
  return errors_of(2, [&](const comm::Group& group) {
    Layers model;
    auto sharded = fully_shard(*model, group, options);
    optim::AdamW own(sharded.named_parameters());
    torch::optim::SGD torchs(sharded.parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      // Ranks' shards have norms of their own.
      const Batch batch = LayersTask::batch(step);
      (model->forward(batch.input) * at::linspace(0, 1, LayersImpl::kWidth))
          .pow(2)
          .sum()
          .backward();
      clip(group, sharded);
      step == 1 ? own.step() : void(torchs.step());
      own.zero_grad();
    }
  });
}

TEST(FirstMistakes, ClippingByTheNormOfOneRanksShards) {
  const std::vector<Clip> clips{[](const comm::Group&, const auto& sharded) {
                                  torch::nn::utils::clip_grad_norm_(sharded.parameters(), 0.01);
                                },
                                [](const comm::Group&, const auto& sharded) {
                                  optim::clip_grad_norm_(sharded.parameters(), 0.01);
                                }};
  for (const Strategy strategy : {Strategy::full_shard, Strategy::optimizer}) {
    for (const bool orig : {false, true}) {
      auto options = weights_only(strategy);
      options.use_orig_params = orig;
      for (const Clip& clip : clips) {
        EXPECT_THAT(errors_of_clipping(clip, options),
                    Each(AllOf(HasSubstr("torch::nn::utils::clip_grad_norm_"),
                               HasSubstr("what fully_shard returned"))));
      }
    }
  }
}

TEST(FirstMistakes, OtherWaysToClipAreRight) {
  const std::vector<Clip> clips{
      [](const comm::Group&, const auto& sharded) { sharded.clip_grad_norm_(0.01); },
      [](const comm::Group&, const auto& sharded) {
        torch::nn::utils::clip_grad_value_(sharded.parameters(), 1e-4);
      },
      [](const comm::Group& group, const auto& sharded) {
        at::Tensor squares = at::zeros({1});
        for (const at::Tensor& shard : sharded.parameters()) squares += shard.grad().pow(2).sum();
        comm::all_reduce(squares, group).wait();
        const double norm = std::sqrt(squares.item<double>());
        for (const at::Tensor& shard : sharded.parameters()) shard.grad().mul_(0.01 / norm);
      },
      [](const comm::Group& group, const auto& sharded) {  // another factor for every tensor
        double factor = group.rank() + 1;
        for (const at::Tensor& shard : sharded.parameters()) shard.grad().mul_(factor += 0.3);
      },
      [](const comm::Group&, const auto&) {}};
  for (size_t i = 0; i < clips.size(); ++i)
    EXPECT_THAT(errors_of_clipping(clips[i], weights_only()), Each(IsEmpty())) << i;
  // A rank that owns whole tensors may scale each by its own norm.
  auto options = weights_only();
  options.use_orig_params = true;
  options.advanced.granularity = parallel::ShardGranularity::tensors;
  EXPECT_THAT(errors_of_clipping(
                  [](const comm::Group&, const auto& sharded) {
                    for (const at::Tensor& shard : sharded.parameters())
                      torch::nn::utils::clip_grad_norm_(shard, 0.01);
                  },
                  options),
              Each(IsEmpty()));
}

// ---- shared modules ----

// Two layers that are one.
class TwiceImpl : public torch::nn::Module {
 public:
  TwiceImpl() {
    first = register_module("first", torch::nn::Linear(6, 6));
    second = register_module("second", first);
    fill_parameters(*this, 5);
  }
  at::Tensor forward(const at::Tensor& x) { return second(at::tanh(first(x))); }
  torch::nn::Linear first{nullptr}, second{nullptr};
};
TORCH_MODULE(Twice);

// torch's list has each parameter twice, and torch's optimizer steps it as often.
TEST(SharedModules, AreListedAndSteppedOnce) {
  Twice torchs;
  ASSERT_EQ(torchs->parameters().size(), 4U);
  torchs->first->bias.mutable_grad() = at::ones({6});
  const at::Tensor before = torchs->first->bias.detach().clone();
  torch::optim::SGD(torchs->parameters(), 0.25).step();
  ASSERT_TRUE(torchs->first->bias.equal(before - 0.5));
  for (const int ranks : {1, 2}) {
    EXPECT_THAT(errors_of(ranks,
                          [](const comm::Group& group) {
                            Twice plain;
                            plain->forward(input_of(0)).sum().backward();
                            const double norm = optim::grad_norm(
                                std::vector{plain->first->weight, plain->first->bias});
                            require(optim::clip_grad_norm_(plain, norm / 2) == norm, "norm");
                            const at::Tensor expected =
                                plain->first->weight.detach() - 0.1 * plain->first->weight.grad();

                            auto ddp = parallel::ddp(Twice(), group);
                            require(ddp.parameters().size() == 2, "parameters");
                            require(ddp.named_parameters().keys() ==
                                        std::vector<std::string>{"first.weight", "first.bias"},
                                    "names");
                            torch::optim::SGD optimizer(ddp.parameters(), 0.1);
                            ddp.forward(input_of(0)).sum().backward();
                            optim::clip_grad_norm_(ddp.parameters(), norm / 2);
                            optimizer.step();
                            require(at::allclose(ddp.module()->first->weight, expected), "ddp");

                            Twice model;
                            const auto sharded = fully_shard(*model, group, {.min_num_params = 1});
                            torch::optim::SGD of_shards(sharded.parameters(), 0.1);
                            model->forward(input_of(0)).sum().backward();
                            sharded.clip_grad_norm_(norm / 2);
                            of_shards.step();
                            const auto state = by_name(sharded.full_state_dict());
                            require(state.size() == 2, "state");
                            require(at::allclose(state.at("first.weight"), expected), "shards");
                            require(optim::model_parameters(*model).size() == 2, "inventory");
                          }),
                Each(IsEmpty()));
  }
}

// ---- ranks that do not do the same ----

TEST(FirstMistakes, OtherNumbersOfBatches) {
  const auto of_ddp = errors_of(2, [](const comm::Group& group) {
    auto ddp = parallel::ddp(Layers(), group);
    for (int step = 0; step < 2 + group.rank(); ++step) {
      const Batch batch = LayersTask::batch(step);
      LayersTask::loss(ddp.forward(batch.input), batch).backward();
    }
  });
  EXPECT_THAT(of_ddp[0], IsEmpty());
  EXPECT_THAT(of_ddp[1],
              AllOf(HasSubstr("rank 0"), HasSubstr("uneven_inputs"), HasSubstr("join()")));
  const auto of_shards = errors_of(2, [](const comm::Group& group) {
    Layers model;
    const auto sharded = fully_shard(*model, group, weights_only());
    for (int step = 0; step < 2 + group.rank(); ++step) backward(model, step);
  });
  EXPECT_THAT(of_shards[0], IsEmpty());
  EXPECT_THAT(of_shards[1], AllOf(HasSubstr("rank 0"), HasSubstr("number of batches")));
}

TEST(FirstMistakes, EvaluatingOnARankThatIsAlone) {
  const auto errors = errors_of(2, [](const comm::Group& group) {
    Layers model;
    auto sharded = fully_shard(*model, group, weights_only());
    torch::optim::SGD optimizer(sharded.parameters(), 0.1);
    backward(model, 0);
    optimizer.step();
    if (group.rank() == 1) return;
    sharded.eval();
    const at::NoGradGuard no_grad;
    model->forward(LayersTask::batch(1).input);
  });
  EXPECT_THAT(errors[1], IsEmpty());
  EXPECT_THAT(errors[0], AllOf(HasSubstr("rank 1"), HasSubstr("evaluate")));
}

}  // namespace
}  // namespace lockstep::test
