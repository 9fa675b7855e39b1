// SPDX-License-Identifier: Apache-2.0
// Modules that ranks share compute what one process computes, with exactly the collectives that
// they need.
#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/normalization.h>

#include <limits>
#include <map>

#include "lockstep/comm/backend.h"
#include "lockstep/comm/group.h"
#include "lockstep/core/error.h"
#include "lockstep/nn/dropout.h"
#include "lockstep/nn/embedding.h"
#include "lockstep/nn/init_model.h"
#include "lockstep/nn/linear.h"
#include "lockstep/nn/loss.h"
#include "lockstep/nn/norm.h"
#include "lockstep/optim/autocast.h"
#include "lockstep/optim/parameters/placed_runs.h"
#include "lockstep/parallel/tensor/tensor.h"
#include "tests/parallel/tensor/net.h"
#include "tests/support/says.h"

namespace lockstep::test {
namespace {

using fabric::OpKind;
using layout::TensorPlan;
using layout::TensorStyle;
using parallel::TensorParallel;
using testing::ElementsAre;
using testing::Pair;

// Passes operations on, and counts them.
class CountingImpl : public comm::detail::GroupImpl {
 public:
  explicit CountingImpl(const comm::Group& inner)
      : GroupImpl(comm::detail::impl_of(inner).membership(),
                  comm::detail::impl_of(inner).backend()),
        inner_(inner) {}

  std::shared_ptr<comm::detail::Pending> submit(fabric::Operation operation,
                                                std::shared_ptr<const void> memory) override {
    ++counts[operation.kind];
    return comm::detail::impl_of(inner_).submit(operation, std::move(memory));
  }
  std::shared_ptr<std::byte> allocate(size_t bytes) override {
    return comm::detail::impl_of(inner_).allocate(bytes);
  }
  bool reaches(const void* data, size_t bytes) const override {
    return comm::detail::impl_of(inner_).reaches(data, bytes);
  }

  std::map<OpKind, int> counts;

 private:
  comm::Group inner_;
};

struct Case {
  int ranks;
  bool sequence_parallel;
  int64_t rows, vocab;
};

void PrintTo(const Case& c, std::ostream* out) {
  *out << c.ranks << " ranks, " << c.rows << " rows, vocabulary " << c.vocab
       << (c.sequence_parallel ? ", sequence parallel" : "");
}

class TensorParallelNet : public testing::TestWithParam<Case> {};

// One fused and gated, one uneven vocabulary: losses, norms and every gradient.
TEST_P(TensorParallelNet, ComputesWhatOneProcessComputes) {
  const Case& c = GetParam();
  const at::Tensor input = tokens(c.rows, c.vocab), target = input.flatten().roll(1);
  target[2] = nn::kIgnoredTarget;
  Net whole = made(c.vocab);
  const at::Tensor expected = nn::cross_entropy(whole(input).flatten(0, 1), target, {.scale = 0.5});
  expected.backward();
  const double norm = optim::grad_norm(whole->parameters());
  comm::run_threads(c.ranks, [&](const comm::Group& group) {
    Net net = group.rank() == 0 ? made(c.vocab) : Net(c.vocab);  // the others get rank 0's
    const TensorParallel shared =
        parallel::tensor_parallel(net, group, plan(), {.sequence_parallel = c.sequence_parallel});
    const at::Tensor loss = nn::cross_entropy(net(input).flatten(0, 1), target,
                                              {.scale = 0.5, .group = group, .vocab = c.vocab});
    loss.backward();
    shared.reduce_gradients();
    EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-6 * expected.item<double>());
    EXPECT_NEAR(shared.grad_norm(), norm, 1e-5 * norm);
    expect_gradients(*net, shared, *whole);
  });
}

INSTANTIATE_TEST_SUITE_P(Layouts, TensorParallelNet,
                         testing::Values(Case{1, true, 3, 11}, Case{2, false, 3, 11},
                                         Case{2, true, 3, 11}, Case{2, true, 1, 12},
                                         Case{4, false, 1, 11}, Case{4, true, 3, 13},
                                         Case{3, false, 2, 11}));

using Counts = std::map<OpKind, int>;

struct Counted {
  Counts forward, backward, gradients;
};

// Of one MLP, whose input needs a gradient.
Counted count_mlp(bool sequence_parallel) {
  Counted counted;
  comm::run_threads(2, [&](const comm::Group& group) {
    const auto counting = std::make_shared<CountingImpl>(group);
    Net net = made();
    const TensorParallel shared = parallel::tensor_parallel(
        *net, comm::Group(counting), plan(), {.sequence_parallel = sequence_parallel});
    const at::Tensor input = at::ones({3, sequence_parallel ? 2 : 4, 8}).requires_grad_();
    counting->counts.clear();
    const at::Tensor output = net->mlp(input);
    const Counts forward = std::exchange(counting->counts, {});
    output.sum().backward();
    const Counts backward = std::exchange(counting->counts, {});
    shared.reduce_gradients();
    if (group.rank() == 0) counted = {forward, backward, counting->counts};
  });
  return counted;
}

TEST(TensorParallel, AnMlpCostsOneAllReduceEachWay) {
  const Counted counted = count_mlp(false);
  EXPECT_THAT(counted.forward, ElementsAre(Pair(OpKind::all_reduce, 1)));
  EXPECT_THAT(counted.backward, ElementsAre(Pair(OpKind::all_reduce, 1)));
  EXPECT_THAT(counted.gradients, ElementsAre());
}

TEST(TensorParallel, WithSequenceParallelismOneGatherAndOneReductionEachWayAndOneGatherMore) {
  const Counted counted = count_mlp(true);
  EXPECT_THAT(counted.forward,
              ElementsAre(Pair(OpKind::all_gather, 1), Pair(OpKind::reduce_scatter, 1)));
  EXPECT_THAT(counted.backward,
              ElementsAre(Pair(OpKind::all_gather, 2), Pair(OpKind::reduce_scatter, 1)));
  EXPECT_THAT(counted.gradients, ElementsAre(Pair(OpKind::all_reduce, 1)));  // down's bias
}

TEST(TensorParallel, ALossGathersNoLogits) {
  comm::run_threads(2, [&](const comm::Group& group) {
    const auto counting = std::make_shared<CountingImpl>(group);
    const at::Tensor logits = at::randn({5, group.rank() == 0 ? 6 : 5}).requires_grad_();
    const at::Tensor loss = nn::cross_entropy(logits, at::arange(5, at::kLong),
                                              {.group = comm::Group(counting), .vocab = 11});
    loss.backward();
    EXPECT_THAT(counting->counts, ElementsAre(Pair(OpKind::all_reduce, 2)));
  });
}

// Weights that no input came by get no gradient, and nobody waits.
TEST(TensorParallel, AnInputWithoutGradientCostsNothingInBackward) {
  comm::run_threads(2, [&](const comm::Group& group) {
    const auto counting = std::make_shared<CountingImpl>(group);
    Net net = made();
    parallel::tensor_parallel(*net, comm::Group(counting), plan());
    const at::Tensor output = net->mlp(at::ones({3, 4, 8}));
    counting->counts.clear();
    output.sum().backward();
    EXPECT_THAT(counting->counts, ElementsAre());
  });
}

// The bits of a dropout do not depend on who has which part of the sequence.
TEST(TensorParallel, DropoutOfPartsIsThatOfTheWhole) {
  nn::Dropout whole(0.5, {.name = "d", .context = std::make_shared<nn::RandomContext>()});
  const at::Tensor x = at::ones({3, 8, 5});
  for (const bool rows : {false, true}) {
    auto context = std::make_shared<nn::RandomContext>();
    if (rows) context->rows = layout::Range{2, 5};
    whole->context = context;
    const at::Tensor expected = whole(x);
    comm::run_threads(4, [&](const comm::Group& group) {
      nn::Dropout part(0.5, {.name = "d", .context = context});
      part->sharing = nn::Sharing{group, TensorStyle::sequence, true};
      EXPECT_TRUE(at::equal(part(x.narrow(1, 2 * group.rank(), 2)),
                            expected.narrow(1, 2 * group.rank(), 2)));
    });
  }
}

// Autocast computes products in another type than the parameters have.
TEST(TensorParallel, GradientsHaveTheTypesOfWhatTheyAreOf) {
  comm::run_threads(2, [&](const comm::Group& group) {
    for (const bool sequence : {false, true}) {
      Net net = made();
      parallel::tensor_parallel(*net, group, plan(), {.sequence_parallel = sequence});
      const at::Tensor input = at::ones({3, sequence ? 2 : 4, 8}).requires_grad_();
      at::Tensor output;
      {
        const optim::AutocastGuard autocast({.enabled = true});
        output = net->up(input);
      }
      EXPECT_EQ(output.scalar_type(), at::kBFloat16);
      output.to(at::kFloat).sum().backward();
      EXPECT_EQ(input.grad().scalar_type(), at::kFloat);
      EXPECT_EQ(net->up->weight.grad().scalar_type(), at::kFloat);
      EXPECT_EQ(net->up->bias.grad().scalar_type(), at::kFloat);
      EXPECT_GT(net->up->weight.grad().abs().sum().item<double>(), 0);
    }
  });
}

// Without rows in front of the sequence.
TEST(TensorParallel, SequencesNeedNoBatch) {
  Net whole = made();
  const at::Tensor x = at::arange(32, at::kFloat).view({4, 8}).mul(0.1);
  const at::Tensor expected = whole->mlp(x);
  comm::run_threads(2, [&](const comm::Group& group) {
    Net net = made();
    parallel::tensor_parallel(*net, group, plan(), {.sequence_parallel = true});
    EXPECT_TRUE(at::allclose(net->mlp(x.narrow(0, 2 * group.rank(), 2)),
                             expected.narrow(0, 2 * group.rank(), 2), 1e-5, 1e-6));
  });
}

// Where a part of the vocabulary is ruled out.
TEST(TensorParallel, LogitsMayBeInfinite) {
  const double infinity = std::numeric_limits<double>::infinity();
  at::Tensor logits = at::arange(12, at::kFloat).view({2, 6});
  logits.select(1, 5).fill_(-infinity);
  logits.select(1, 0).fill_(-infinity);
  const at::Tensor target = at::tensor({4, 1}, at::kLong);
  const double expected = nn::cross_entropy(logits, target).item<double>();
  comm::run_threads(2, [&](const comm::Group& group) {
    const at::Tensor mine = logits.narrow(1, 3 * group.rank(), 3).clone();
    EXPECT_NEAR(nn::cross_entropy(mine, target, {.group = group, .vocab = 6}).item<double>(),
                expected, 1e-5);
  });
}

std::string message_of(const std::function<void()>& function) {
  try {
    function();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

// Of all ranks: they find it by themselves, before any waits for another.
std::string message_for(const TensorPlan& bad, int ranks = 2) {
  std::vector<std::string> messages(static_cast<size_t>(ranks));
  comm::run_threads(ranks, [&](const comm::Group& group) {
    Net net = made();
    messages[static_cast<size_t>(group.rank())] =
        message_of([&] { parallel::tensor_parallel(*net, group, bad); });
  });
  for (const std::string& message : messages) EXPECT_EQ(message, messages[0]);
  return messages[0];
}

TEST(TensorParallelInput, IsRefusedWithTheNumbers) {
  TensorPlan twice = plan();
  twice.push_back({"u*", TensorStyle::column});
  EXPECT_THAT(message_for(twice), says("[tensor] ... module 'up' ... 'up' and by 'u*' ... once"));
  TensorPlan none = plan();
  none.push_back({"blocks.*.up", TensorStyle::column});
  EXPECT_THAT(message_for(none), says("[tensor] ... 'blocks.*.up' ... no module"));
  EXPECT_THAT(message_for({{"up", TensorStyle::column, {12, 12}}}, 8),
              says("[tensor] ... 'up' ((24, 8)) ... part of 12 ... divisible by 8 ranks"));
  EXPECT_THAT(message_for({{"up", TensorStyle::column, {5, 5}}}),
              says("[tensor] ... 'up' ... 24 outputs ... parts 5, 5"));
  EXPECT_THAT(message_for({{"down", TensorStyle::row}}, 5),
              says("[tensor] ... 'down' ((8, 12)) ... part of 12 ... divisible by 5 ranks"));
  EXPECT_THAT(message_for({{"embed", TensorStyle::vocab}}, 12),
              says("[tensor] ... 'embed' ... 11 rows ... 12 ranks"));
  EXPECT_THAT(message_for({{"norm", TensorStyle::column}}),
              says("'norm' ... lockstep::nn::LayerNormImpl ... style column"));
  EXPECT_THAT(message_for({{"embed", TensorStyle::row}}), says("'embed' ... style row"));
  EXPECT_THAT(message_for({{"head", TensorStyle::vocab, {11}}}),
              says("[tensor] ... 'head' ... parts 11 ... column and row"));
  EXPECT_THAT(message_for({{"up", TensorStyle::column, {-4, 28}}}),
              says("[tensor] ... 'up' ((24, 8)) ... part of -4 ... divisible by 2 ranks"));
}

// What nobody names would be trained on a part of the sequence, and nobody would notice.
TEST(TensorParallelInput, SequenceParallelismNeedsEveryParameterNamed) {
  comm::run_threads(2, [&](const comm::Group& group) {
    Net net = made();
    TensorPlan incomplete = plan();
    std::erase_if(incomplete, [](const auto& rule) { return rule.pattern == "norm"; });
    EXPECT_THAT(message_of([&] {
                  parallel::tensor_parallel(*net, group, incomplete, {.sequence_parallel = true});
                }),
                says("[tensor] ... no rule names 'norm' ... 'weight' ... sequence parallelism"));
  });
}

TEST(TensorParallelInput, AModuleWithTwoNamesHasOneRule) {
  comm::run_threads(2, [&](const comm::Group& group) {
    Net net = made();
    net->register_module("again", net->embed);
    TensorPlan twice = plan();
    twice.push_back({"again", TensorStyle::vocab});
    EXPECT_THAT(message_of([&] { parallel::tensor_parallel(*net, group, twice); }),
                says("[tensor] ... 'embed.weight' ... 'again.weight' ... one parameter"));
  });
}

TEST(TensorParallelInput, TokensMustBeInTheVocabulary) {
  comm::run_threads(2, [&](const comm::Group& group) {
    Net net = made();
    parallel::tensor_parallel(*net, group, plan());
    EXPECT_EQ(message_of([&] {
                net->embed(at::tensor({3, 11}, at::kLong));
              }),
              "[embedding] indices go from 3 to 11, must be from 0 to 10");
  });
}

TEST(TensorParallelInput, SequencesMustDivide) {
  comm::run_threads(2, [&](const comm::Group& group) {
    Net net = made();
    parallel::tensor_parallel(*net, group, plan(), {.sequence_parallel = true});
    EXPECT_THAT(message_of([&] {
                  net(at::zeros({2, 3}, at::kLong));
                }),
                says("[sequence parallel] ... 3 positions ... divisible by 2 ranks"));
  });
}

TEST(TensorParallelInput, LogitsMustBeTheRanksShare) {
  comm::run_threads(2, [&](const comm::Group& group) {
    const auto loss = [&](int64_t columns, int64_t target) {
      nn::cross_entropy(at::ones({1, columns}), at::full({1}, target, at::kLong),
                        {.group = group, .vocab = 11});
    };
    EXPECT_THAT(message_of([&] { loss(7, 0); }),
                says("[cross_entropy] ... 7 columns ... rank " + std::to_string(group.rank()) +
                     " of 2 ... must have " + (group.rank() == 0 ? "6" : "5") +
                     " ... vocabulary of 11 ... option vocab"));
    EXPECT_THAT(message_of([&] { loss(group.rank() == 0 ? 6 : 5, 11); }),
                says("[cross_entropy] ... targets ... 11 to 11 ... vocabulary of 11 ... -100"));
  });
}

// Values are places in the whole tensors. Inputs of `down` are shared out one by one, so that a
// rank has two ranges of each row.
TEST(TensorParallel, PartsForTheOptimizerSayWhereElementsAre) {
  for (const bool fused_rows : {false, true}) {
    comm::run_threads(2, [&](const comm::Group& group) {
      Net net = made();
      for (const auto& parameter : net->parameters()) {
        const at::NoGradGuard no_grad;
        parameter.copy_(at::arange(parameter.numel()).view(parameter.sizes()));
      }
      TensorPlan rules = plan();
      if (fused_rows) rules[4].parts = {8, 4};
      const auto shared = parallel::tensor_parallel(net, group, rules);
      for (const auto& parameter : shared.placed(optim::named_parameters(*net))) {
        const at::Tensor values = parameter.tensor.detach().flatten();
        int64_t covered = 0;
        for (const auto& runs : optim::detail::placed_runs(parameter)) {
          EXPECT_EQ(runs.tensor, parameter.name);
          for (int64_t i = 0; i < runs.count; ++i, ++covered) {
            EXPECT_EQ(values[runs.begin + i].item<float>(),
                      runs.first + i / runs.length * runs.stride + i % runs.length)
                << parameter.name << " " << i;
          }
        }
        EXPECT_EQ(covered, values.numel()) << parameter.name;
      }
    });
  }
}

}  // namespace
}  // namespace lockstep::test
