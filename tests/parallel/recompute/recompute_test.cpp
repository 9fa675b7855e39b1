// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/recompute/recompute.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <functional>
#include <memory>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/core/error.h"
#include "lockstep/nn/attention.h"
#include "lockstep/nn/dropout.h"
#include "lockstep/optim/autocast.h"
#include "lockstep/parallel/data/ddp.h"
#include "tests/support/models.h"
#include "tests/support/says.h"

namespace lockstep::parallel {
namespace {

using test::says;

struct Net {
  torch::nn::Linear first{8, 16}, second{16, 8};
  int calls = 0;

  at::Tensor operator()(const at::Tensor& x) {
    ++calls;
    return second(at::gelu(first(x)));
  }
  std::vector<at::Tensor> parameters() const {
    return {first->weight, first->bias, second->weight, second->bias};
  }
  std::vector<at::Tensor> take_grads() const {
    std::vector<at::Tensor> grads;
    for (const at::Tensor& parameter : parameters()) {
      grads.push_back(parameter.grad().clone());
      parameter.mutable_grad() = at::Tensor();
    }
    return grads;
  }
};

void expect_equal_all(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << i;
}

TEST(Recompute, GradientsAreTheSameBits) {
  Net net;
  const at::Tensor x = at::randn({4, 8});
  for (const bool needs_grad : {false, true}) {  // an input without is no special case
    at::Tensor input = x.clone().set_requires_grad(needs_grad);
    net(input).square().sum().backward();
    const auto expected = net.take_grads();
    const at::Tensor input_grad = input.grad();
    input.mutable_grad() = at::Tensor();
    net.calls = 0;
    const at::Tensor out = recompute([&net, input] { return net(input); });
    EXPECT_EQ(net.calls, 1);
    out.square().sum().backward();
    EXPECT_EQ(net.calls, 2);
    expect_equal_all(net.take_grads(), expected);
    if (needs_grad) {
      EXPECT_TRUE(at::equal(input.grad(), input_grad));
    }
  }
}

// What the switch of the model-parallel configuration does: calls of the layer, and the same bits.
TEST(Recompute, LayersOfAModelParallelContext) {
  Net net;
  const at::Tensor x = at::randn({4, 8});
  torch::nn::Sequential sequential(
      net.first, torch::nn::Functional([](const at::Tensor& h) { return at::gelu(h); }),
      net.second);
  std::vector<at::Tensor> outputs;
  std::vector<std::vector<at::Tensor>> gradients;
  for (const bool checkpointing : {false, true}) {
    const mesh::ModelParallelContext context({.gradient_checkpointing = checkpointing},
                                             comm::Group());
    const std::vector layers{std::ref(net), std::ref(net)};
    net.calls = 0;
    outputs.push_back(run_layers(context, layers, x));
    EXPECT_EQ(net.calls, 2);
    outputs.back().square().sum().backward();
    EXPECT_EQ(net.calls, checkpointing ? 4 : 2);
    gradients.push_back(net.take_grads());
    // Holders, pointers and the modules of a Sequential are layers, too.
    const at::Tensor twice = run_layers(context, *sequential, run_layers(context, *sequential, x));
    EXPECT_TRUE(at::equal(twice, outputs.back()));
    twice.square().sum().backward();
    expect_equal_all(net.take_grads(), gradients.back());
    const std::vector<torch::nn::Linear> holders{net.first, net.second};
    const std::vector<std::shared_ptr<torch::nn::LinearImpl>> pointers{net.first.ptr(),
                                                                       net.second.ptr()};
    EXPECT_TRUE(at::equal(run_layers(context, holders, x), run_layers(context, pointers, x)));
  }
  EXPECT_TRUE(at::equal(outputs[0], outputs[1]));
  expect_equal_all(gradients[0], gradients[1]);
}

TEST(Recompute, KeepsNothingThatTheFunctionDoesNotHold) {
  Net net;
  const at::Tensor x = at::randn({4, 8});
  c10::weak_intrusive_ptr<c10::StorageImpl> kept(c10::intrusive_ptr<c10::StorageImpl>{});
  const auto run = [&] {
    const at::Tensor hidden = net.first(x);
    kept = c10::weak_intrusive_ptr<c10::StorageImpl>(
        c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(
            hidden.storage().unsafeGetStorageImpl()));
    return net.second(at::gelu(hidden));
  };
  const at::Tensor plain = run();
  EXPECT_FALSE(kept.expired());  // gelu keeps its input
  const at::Tensor out = recompute(run);
  EXPECT_TRUE(kept.expired());
  out.sum().backward();
}

// The product that makes the result is not needed again.
TEST(Recompute, StopsWhenItHasAll) {
  Net net;
  const at::Tensor x = at::randn({4, 8});
  int ends = 0;
  const at::Tensor out = recompute([&] {
    at::Tensor y = net(x);
    ++ends;
    return y;
  });
  out.sum().backward();
  EXPECT_EQ(net.calls, 2);
  EXPECT_EQ(ends, 1);
}

TEST(Recompute, RandomNumbersAreThoseOfTheFirstCall) {
  Net net;
  torch::nn::Dropout drop(0.5);
  const auto random = std::make_shared<nn::RandomContext>();
  nn::Dropout own(0.5, {.name = "own", .context = random});
  const at::Tensor x = at::randn({4, 8});
  const auto body = [&] { return net(own(drop(net(x)))); };
  at::manual_seed(5);
  random->position = {.step = 3, .micro_batch = 1};
  body().sum().backward();
  const auto expected = net.take_grads();

  at::manual_seed(5);
  const at::Tensor out = recompute(body, {.random = random});
  const at::Tensor before = at::rand({1});  // draws go on after the first call
  random->position = {.step = 3, .micro_batch = 2};
  at::manual_seed(6);
  out.sum().backward();
  expect_equal_all(net.take_grads(), expected);
  // And nothing of it is seen afterwards.
  EXPECT_EQ(random->position.micro_batch, 2);
  const at::Tensor after = at::rand({1});
  at::manual_seed(6);
  EXPECT_TRUE(at::equal(after, at::rand({1})));
}

TEST(Recompute, AutocastIsThatOfTheFirstCall) {
  std::vector<at::ScalarType> types;
  // Sizes at which every libtorch can multiply bfloat16 matrices.
  const at::Tensor weight = at::randn({8, 8}).set_requires_grad(true), x = at::randn({8, 8});
  const auto body = [&] {
    const at::Tensor y = at::mm(x, weight);
    types.push_back(y.scalar_type());
    return at::sin(y.to(at::kFloat));
  };
  at::Tensor out;
  {
    const optim::AutocastGuard autocast({.device = at::kCPU, .dtype = at::kBFloat16});
    out = recompute(body);
  }
  out.sum().backward();
  EXPECT_THAT(types, testing::ElementsAre(at::kBFloat16, at::kBFloat16));
}

TEST(Recompute, Nests) {
  Net inner, outer;
  const at::Tensor x = at::randn({4, 8}).set_requires_grad(true);
  const auto plain = [&] { return outer(inner(outer(x))); };
  plain().square().sum().backward();
  const auto expected_inner = inner.take_grads(), expected_outer = outer.take_grads();
  const at::Tensor grad = x.grad();
  x.mutable_grad() = at::Tensor();
  recompute([&] {
    const at::Tensor y = outer(x);
    return outer(recompute([&inner, y] { return inner(y); }));
  })
      .square()
      .sum()
      .backward();
  expect_equal_all(inner.take_grads(), expected_inner);
  expect_equal_all(outer.take_grads(), expected_outer);
  EXPECT_TRUE(at::equal(x.grad(), grad));
}

TEST(Recompute, BackwardTwiceComputesTwice) {
  Net net;
  const at::Tensor x = at::randn({4, 8});
  const at::Tensor loss = recompute([&] { return net(x); }).square().sum();
  loss.backward({}, /*retain_graph=*/true);
  const auto first = net.take_grads();
  loss.backward();
  expect_equal_all(net.take_grads(), first);
}

TEST(Recompute, WithoutGradModeItIsAPlainCall) {
  Net net;
  const at::NoGradGuard no_grad;
  EXPECT_FALSE(recompute([&] { return net(at::randn({4, 8})); }).requires_grad());
  EXPECT_EQ(net.calls, 1);
}

TEST(Recompute, AFunctionThatChangesIsNoticed) {
  Net net;
  const at::Tensor x = at::randn({4, 8});
  const at::Tensor out = recompute([&] { return net.calls == 0 ? net(net(x)) : net(x); });
  net.calls = 1;
  try {
    out.sum().backward();
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), says("compute the same"));
  }
}

// Without recomputation autograd would say so.
TEST(Recompute, ChangesInPlaceAreNoticed) {
  const at::Tensor x = at::randn({4}).set_requires_grad(true);
  const at::Tensor out = recompute([&] {
    const at::Tensor y = x.exp();
    y.mul_(2);
    return y.sin();
  });
  EXPECT_THROW(out.sum().backward(), Error);
}

// So it would here: the second call would compute with other weights.
TEST(Recompute, WeightsThatChangeAreNoticed) {
  for (const bool again : {false, true}) {
    Net net;
    const at::Tensor x = at::randn({4, 8});
    const at::Tensor out = again ? recompute([&] { return net(x); }) : net(x);
    {
      const at::NoGradGuard no_grad;
      net.second->weight.mul_(2);
    }
    EXPECT_THROW(out.sum().backward(), std::exception) << again;
  }
}

TEST(Recompute, ErrorsOfTheFunctionReachTheCaller) {
  Net net;
  const at::Tensor x = at::randn({4, 8});
  const auto body = [&] {
    if (net.calls == 1) throw ConfigError("gone");
    return net(x);
  };
  const at::Tensor out = recompute(body);
  EXPECT_THROW(out.sum().backward(), ConfigError);
}

TEST(Recompute, UnderDdpGradientsAreAveragedOnce) {
  using Task = test::TransformerTask;
  const auto gradients = [](bool again) {
    std::vector<std::vector<at::Tensor>> of_ranks(2);
    comm::run_threads(2, [&](const comm::Group& group) {
      auto model = Task::make(1);
      auto wrapped = ddp(model, group);
      const auto batch = Task::batch(group.rank());
      const auto loss = [&] { return Task::loss(wrapped.forward(batch.input), batch); };
      (again ? recompute(loss) : loss()).backward();
      for (const at::Tensor& p : model->parameters()) {
        of_ranks[static_cast<size_t>(group.rank())].push_back(p.grad().clone());
      }
    });
    expect_equal_all(of_ranks[0], of_ranks[1]);
    return of_ranks[0];
  };
  expect_equal_all(gradients(true), gradients(false));
}

// ---- products are kept ----

// Norm, attention by products, a convolution and an MLP, with what makes recomputation hard: biases
// added in place, dropout, a product that is written to after it was read.
struct MixedBlock {
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({8})};
  torch::nn::Linear up{8, 32}, down{32, 8};
  torch::nn::Conv1d mix{torch::nn::Conv1dOptions(8, 8, 3).padding(1)};
  std::vector<const void*> inner;  // where the inner product's result was, in each call

  at::Tensor operator()(const at::Tensor& x) {
    const at::Tensor h = norm(x);
    const at::Tensor scores = at::bmm(h, h.transpose(1, 2)).div_(2);
    const at::Tensor y =
        x + at::bmm(at::softmax(scores, -1), h) + mix(h.transpose(1, 2)).transpose(1, 2);
    const at::Tensor wide = up(y);
    inner.push_back(wide.data_ptr());
    const at::Tensor sum = wide.sum();
    wide.add_(1);  // after it was read
    return y + down(at::dropout(at::gelu(wide), 0.1, true)) * sum.sigmoid();
  }
  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> all;
    for (const torch::nn::Module* module : {static_cast<const torch::nn::Module*>(norm.get()),
                                            static_cast<const torch::nn::Module*>(up.get()),
                                            static_cast<const torch::nn::Module*>(down.get()),
                                            static_cast<const torch::nn::Module*>(mix.get())}) {
      for (const at::Tensor& parameter : module->parameters()) all.push_back(parameter);
    }
    return all;
  }
};

std::vector<at::Tensor> gradients_of(MixedBlock& block, const at::Tensor& x,
                                     const std::function<at::Tensor()>& run) {
  at::manual_seed(3);
  block.inner.clear();
  run().square().sum().backward();
  std::vector<at::Tensor> found{x.grad()};
  x.mutable_grad() = at::Tensor();
  for (const at::Tensor& parameter : block.parameters()) {
    found.push_back(parameter.grad());
    parameter.mutable_grad() = at::Tensor();
  }
  return found;
}

TEST(RecomputeSelective, GradientsAreTheSameBitsAndProductsAreNotComputedAgain) {
  MixedBlock block;
  const at::Tensor x = at::randn({2, 5, 8}).set_requires_grad(true);
  const auto body = [&] { return block(block(x)); };
  const auto expected = gradients_of(block, x, body);
  expect_equal_all(gradients_of(block, x, [&] { return recompute(body, {.keep_products = true}); }),
                   expected);
  ASSERT_EQ(block.inner.size(), 4U);  // of two blocks, twice
  // The first was read and then written to, so that a copy is kept. See below for those that are
  // not.
  const auto nested = [&] {
    return recompute(
        [&] { return block(recompute([&] { return block(x); }, {.keep_products = true})); },
        {.keep_products = true});
  };
  expect_equal_all(gradients_of(block, x, nested), expected);
}

// A product has the memory of the first call in the second, unless it was computed again.
TEST(RecomputeSelective, ResultsComeFromTheFirstCall) {
  torch::nn::Linear flat(8, 16), down(16, 8);
  const at::Tensor x = at::randn({2, 3, 8}).set_requires_grad(true);
  const at::Tensor q = at::randn({1, 2, 4, 8}).set_requires_grad(true);
  std::vector<std::vector<const void*>> calls;
  const auto body = [&] {
    const at::Tensor biased = flat(x);  // an addition in place, right after the product
    const at::Tensor plain = at::matmul(x, flat->weight.t());
    const at::Tensor mixed = nn::causal_attention(q, q, q);
    const at::Tensor cheap = at::gelu(biased);
    calls.push_back({biased.data_ptr(), plain.data_ptr(), mixed.data_ptr(), cheap.data_ptr()});
    return down(cheap + plain.exp()).sum() + mixed.exp().sum();
  };
  const at::Tensor out = recompute(body, {.keep_products = true});
  const at::Tensor hold = at::empty({1 << 16});  // memory that is free now is taken by others
  out.backward();
  ASSERT_EQ(calls.size(), 2U);
  for (const size_t product : {0, 1, 2}) EXPECT_EQ(calls[0][product], calls[1][product]) << product;
}

// The memory of what backward will not ask for is free.
TEST(RecomputeSelective, TheLastProductIsNotKept) {
  Net net;
  const at::Tensor x = at::randn({4, 8}).set_requires_grad(true);
  c10::weak_intrusive_ptr<c10::StorageImpl> first(c10::intrusive_ptr<c10::StorageImpl>{}),
      last = first;
  const auto weak = [](const at::Tensor& tensor) {
    return c10::weak_intrusive_ptr<c10::StorageImpl>(
        c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(
            tensor.storage().unsafeGetStorageImpl()));
  };
  const at::Tensor out = recompute(
      [&] {
        const at::Tensor hidden = net.first(x);
        at::Tensor result = net.second(at::gelu(hidden));
        first = weak(hidden);
        last = weak(result);
        return result.sum();
      },
      {.keep_products = true});
  EXPECT_FALSE(first.expired());
  EXPECT_TRUE(last.expired());
  out.backward();
}

TEST(RecomputeSelective, BackwardTwiceGivesTheSameTwice) {
  MixedBlock block;
  const at::Tensor x = at::randn({2, 5, 8}).set_requires_grad(true);
  at::Tensor loss;
  const auto first = gradients_of(block, x, [&] {
    loss = recompute([&] { return block(x); }, {.keep_products = true}).square().sum();
    loss.backward({}, /*retain_graph=*/true);
    x.mutable_grad() = at::Tensor();
    for (const at::Tensor& parameter : block.parameters()) parameter.mutable_grad() = at::Tensor();
    return loss;
  });
  expect_equal_all(first, gradients_of(block, x, [&] { return block(x).square().sum(); }));
}

// Linear of three dimensions gives a tensor that autograd does not know to be a view of its
// product.
TEST(RecomputeSelective, AResultThatChangesBeforeBackwardIsNoticed) {
  torch::nn::Linear up(8, 16), down(16, 8);
  const at::Tensor x = at::randn({2, 3, 8}).set_requires_grad(true);
  for (const int kind : {0, 1, 2}) {
    at::Tensor inner;
    const at::Tensor out = recompute(
        [&] {
          // Parts of an unsafe_split are no views for autograd either.
          const at::Tensor hidden = kind == 0   ? at::matmul(x, up->weight.t())
                                    : kind == 1 ? up(x)
                                                : at::unsafe_split(up(x), 2, 0)[0];
          if (!inner.defined()) inner = hidden;
          return down(hidden.exp()).sum();
        },
        {.keep_products = true});
    {
      const at::NoGradGuard no_grad;
      inner.mul_(2);
    }
    try {
      out.backward();
      FAIL() << "no error";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), says("changed in place"));
    }
  }
}

TEST(RecomputeSelective, AFunctionThatComputesSomethingElseIsNoticed) {
  Net net;
  const at::Tensor x = at::randn({4, 8}), cube = at::randn({2, 4, 8});
  const at::Tensor out = recompute(
      [&] {
        if (net.calls == 0) return net(x).exp();
        return net(at::bmm(cube, cube.transpose(1, 2)).sum({0}).narrow(1, 0, 4).repeat({1, 2}))
            .exp();
      },
      {.keep_products = true});
  try {
    out.sum().backward();
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), says("compute the same"));
  }
}

}  // namespace
}  // namespace lockstep::parallel
