// SPDX-License-Identifier: Apache-2.0
// Whatever goes between stages, a pipeline trains as one process does.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <tuple>

#include "lockstep/core/error.h"
#include "tests/parallel/pipeline/follow.h"
#include "tests/support/subprocess.h"

namespace lockstep::test {
namespace {

using parallel::function_layer;
using parallel::layer;

TEST(PipelineValues, OneTensor) { follow_all({.layers = blocks(4)}); }

// x and y from two layers' worth of weights, and a third tensor that is made on the way.
struct ForkImpl : torch::nn::Module {
  std::tuple<at::Tensor, std::tuple<at::Tensor, at::Tensor>> forward(const at::Tensor& x,
                                                                     const at::Tensor& y) {
    return {at::tanh(a(x) + y), {b(y), x * y}};
  }
  torch::nn::Linear a = register_module("a", torch::nn::Linear(6, 6));
  torch::nn::Linear b = register_module("b", torch::nn::Linear(6, 6));
};
TORCH_MODULE(Fork);

struct JoinImpl : torch::nn::Module {
  Tensors forward(const at::Tensor& x, const at::Tensor& y, const at::Tensor& z) {
    return {a(x) * y, at::sin(z)};
  }
  torch::nn::Linear a = register_module("a", torch::nn::Linear(6, 6));
};
TORCH_MODULE(Join);

TEST(PipelineValues, SeveralTensors) {
  PipelineJob job;
  job.layers = {layer("one", [] { return Fork(); }), layer("two", [] { return Join(); }),
                layer("three", [] { return Fork(); }), layer("four", [] { return Join(); })};
  job.inputs = [](int64_t i) { return Tensors{random({3, 6}, i), random({3, 6}, 500 + i)}; };
  follow_all(job);
}

// Tokens and a mask travel with the values and are used by every layer.
struct LookupImpl : torch::nn::Module {
  Tensors forward(const Tensors& in) {
    EXPECT_EQ(in.size(), 3u);
    EXPECT_EQ(in[1].scalar_type(), at::kLong);
    EXPECT_EQ(in[2].scalar_type(), at::kBool);
    EXPECT_FALSE(in[1].requires_grad());
    return {at::tanh(in[0] + table(in[1])) * in[2], in[1], in[2]};
  }
  torch::nn::Embedding table = register_module("table", torch::nn::Embedding(5, 6));
};
TORCH_MODULE(Lookup);

TEST(PipelineValues, IntegersArePassedAlong) {
  PipelineJob job;
  for (int i = 0; i < 4; ++i)
    job.layers.push_back(layer("lookup" + std::to_string(i), [] { return Lookup(); }));
  job.inputs = [](int64_t i) {
    return Tensors{
        random({3, 6}, i),
        at::randint(0, 5, {3}, at::detail::createCPUGenerator(static_cast<uint64_t>(i)), at::kLong),
        random({3, 6}, 70 + i) > 0};
  };
  follow_all(job);
}

TEST(PipelineValues, ShapesDifferFromMicroBatchToMicroBatch) {
  PipelineJob job{.layers = blocks(4)};
  job.inputs = [](int64_t i) {
    // One, two and three dimensions, and none of a first size that is the same.
    const at::Tensor x = random({2 + i % 5, 1 + i % 3, 6}, i);
    return Tensors{i % 4 == 0 ? x.select(1, 0) : i % 4 == 1 ? x.select(1, 0).select(0, 0) : x};
  };
  follow_all(job);
}

TEST(PipelineValues, AnEmptyMicroBatch) {
  PipelineJob job{.layers = blocks(4)};
  job.inputs = [](int64_t i) { return Tensors{random({i % 4 == 1 ? 0 : 2, 6}, i)}; };
  follow_all(job);
}

TEST(PipelineValues, NumbersOfDoublePrecisionAndStrides) {
  PipelineJob job;
  job.layers = {
      function_layer([](const Tensors& in) { return Tensors{in[0].t().to(at::kDouble)}; }),
      function_layer([](const Tensors& in) { return Tensors{in[0].t().to(at::kFloat)}; }),
      layer("block", [] { return Block(6); }),
      function_layer([](const Tensors& in) { return Tensors{in[0].narrow(1, 1, 3)}; })};
  follow_all(job);
}

// The first output gets no gradient, and neither do the weights that made it.
struct SpareImpl : torch::nn::Module {
  Tensors forward(const Tensors& in) { return {spare(in.back()), at::tanh(used(in.back()))}; }
  torch::nn::Linear used = register_module("used", torch::nn::Linear(6, 6));
  torch::nn::Linear spare = register_module("spare", torch::nn::Linear(6, 6));
};
TORCH_MODULE(Spare);

TEST(PipelineValues, AnOutputThatNobodyUses) {
  PipelineJob job;
  for (int i = 0; i < 4; ++i)
    job.layers.push_back(layer("spare" + std::to_string(i), [] { return Spare(); }));
  job.loss = [](int64_t, const Tensors& outputs) { return outputs.back().square().sum(); };
  follow_all(job);
}

TEST(PipelineValues, TheSameTensorTwice) {
  PipelineJob job;
  const auto twice = function_layer([](const Tensors& in) { return Tensors{in[0], in[0]}; });
  const auto sum = function_layer([](const Tensors& in) { return Tensors{in[0] * in[1]}; });
  // At the door of a stage and, with two stages, inside one.
  job.layers = {layer("a", [] { return Block(6); }), twice, sum,
                layer("b", [] { return Block(6); })};
  follow_all(job);
  // From the first layer, where a backward in halves ends if the inputs need no gradient.
  job.layers = {layer("a",
                      [] {
                        struct TwiceImpl : BlockImpl {
                          TwiceImpl() : BlockImpl(6) {}
                          Tensors forward(const at::Tensor& x) {
                            const at::Tensor h = BlockImpl::forward(x);
                            return {h, h, h.exp()};
                          }
                        };
                        return std::make_shared<TwiceImpl>();
                      }),
                function_layer([](const Tensors& in) { return Tensors{in[0] * in[1] - in[2]}; }),
                layer("b", [] { return Block(6); }), layer("c", [] { return Block(6); })};
  follow_all(job);
}

TEST(PipelineValues, UnevenSplits) {
  for (PipelineOptions options : kinds()) {
    options.split = options.chunks == 2 ? std::vector<int>{1, 3, 2, 1} : std::vector<int>{5, 2};
    follow({.layers = blocks(7)}, 2, options);
  }
}

TEST(PipelineValues, OneRankAndThree) {
  for (PipelineOptions options : kinds()) {
    follow({.layers = blocks(6)}, 1, options);
    options.microbatches = 6;
    follow({.layers = blocks(6)}, 3, options);
  }
}

// Stages without parameters, and layers that are no modules.
TEST(PipelineValues, Functions) {
  PipelineJob job;
  job.layers = {function_layer([](const Tensors& in) { return Tensors{in[0] * 2}; }),
                layer("only", [] { return Block(6); }),
                function_layer([](const Tensors& in) { return Tensors{at::sigmoid(in[0])}; }),
                function_layer([](const Tensors& in) {
                  return Tensors{in[0].exp(), in[0]};
                })};
  follow_all(job);
}

TEST(PipelineValues, FrozenStages) {
  for (const std::vector<std::string>& frozen : std::vector<std::vector<std::string>>{
           {"blocks.0"}, {"blocks.0", "blocks.1"}, {"blocks.2", "blocks.3"}, {"blocks.1"}}) {
    PipelineJob job{.layers = blocks(4)};
    job.prepare = [&](const std::string& name, at::Tensor tensor) {
      for (const std::string& prefix : frozen) {
        if (name.starts_with(prefix)) tensor.set_requires_grad(false);
      }
    };
    follow_all(job);
  }
}

// Statistics of micro-batches, in their order.
TEST(PipelineValues, Buffers) {
  PipelineJob job;
  for (int i = 0; i < 4; ++i) {
    job.layers.push_back(
        layer("norm" + std::to_string(i), [] { return torch::nn::BatchNorm1d(6); }));
  }
  follow_all(job);
}

TEST(PipelineValues, Recomputed) {
  const TempDir folder;
  for (PipelineOptions options : kinds()) {
    options.advanced.recompute = layout::Recompute::full;
    follow({.layers = blocks(4)}, 2, options);
    options.advanced.store = std::make_shared<parallel::ActivationStore>(folder.path());
    follow({.layers = blocks(4)}, 2, options);
    EXPECT_GT(options.advanced.store->stats().ahead + options.advanced.store->stats().from_memory,
              0U);
  }
}

// A layer that is in the model several times: in one module once.
parallel::Layer shared(bool tied = true) {
  parallel::Layer layer = parallel::tied_layer(
      "shared", [] { return Block(6); },
      [](BlockImpl& block, const Tensors& in) { return block.forward(in[0]); });
  if (!tied) layer.tied.clear();
  return layer;
}

TEST(PipelineValues, TiedParameters) {
  for (const PipelineOptions& options : kinds()) {
    PipelineJob job{.layers = blocks(4)};
    job.layers.front() = job.layers.back() = shared();
    follow(job, 2, options);
    job.layers[1] = job.layers[2] = shared();  // with several copies
    follow(job, 2, options);
    // On one rank too, and where the first layer is an ordinary one.
    job.layers.front() = parallel::layer("shared", [] { return Block(6); });
    follow(job, 1, options);
    follow(job, 2, options);
  }
  // By the names of the parameters.
  PipelineOptions options = kinds()[0];
  options.tied = {"shared.linear.weight", "shared.linear.bias"};
  PipelineJob job{.layers = blocks(4)};
  job.layers.front() = job.layers.back() = shared(/*tied=*/false);
  follow(job, 2, options);
}

TEST(PipelineValues, ATiedLayerNeedsTheSameModule) {
  std::vector<parallel::Layer> layers = blocks(2);
  layers[1] = parallel::tied_layer(
      "blocks.0", [] { return torch::nn::Linear(6, 6); },
      [](torch::nn::LinearImpl& linear, const Tensors& in) { return linear.forward(in[0]); });
  EXPECT_THAT([&] { const Pipeline pipeline(layers, comm::init()); },
              testing::ThrowsMessage<ConfigError>(testing::HasSubstr("'blocks.0'")));
}

}  // namespace
}  // namespace lockstep::test
