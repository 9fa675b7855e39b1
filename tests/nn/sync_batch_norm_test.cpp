// SPDX-License-Identifier: Apache-2.0
// SyncBatchNorm against torch's batch norm on the batches of all ranks laid end to end.
#include "lockstep/nn/sync_batch_norm.h"

#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>

#include <sstream>

#include "lockstep/core/error.h"
#include "tests/support/says.h"

namespace lockstep::nn {
namespace {

using test::says;
using ::testing::HasSubstr;

// Relative to the largest expected value: single elements may be near zero.
double difference(const at::Tensor& actual, const at::Tensor& expected) {
  if (actual.sizes() != expected.sizes()) return 1e9;
  if (expected.numel() == 0) return 0;
  const at::Tensor wanted = expected.detach().to(at::kDouble);
  const double scale = std::max(1e-3, wanted.abs().max().item<double>());
  return (actual.detach().to(at::kDouble) - wanted).abs().max().item<double>() / scale;
}

// Collected on the rank threads, judged on the test's.
struct RankResult {
  at::Tensor output, input_gradient, weight_gradient, bias_gradient, running_mean, running_var;
  int64_t batches = 0;
};

struct BatchShape {
  std::vector<int64_t> rows;        // of each rank
  std::vector<int64_t> inner = {};  // what follows (N, C)
  bool channels_last = false;
  at::ScalarType type = at::kFloat;
  bool affine = true;
};

constexpr int64_t kChannels = 6;
constexpr int kSteps = 3;

at::Tensor batch_of_all(const BatchShape& shape, int step) {
  int64_t rows = 0;
  for (const int64_t n : shape.rows) rows += n;
  std::vector<int64_t> sizes = {rows, kChannels};
  sizes.insert(sizes.end(), shape.inner.begin(), shape.inner.end());
  // Channels with means far from zero: a variance from sums of squares would not survive this.
  const at::Tensor offset = at::linspace(-40, 60, kChannels);
  at::Generator generator = at::detail::createCPUGenerator(static_cast<uint64_t>(step) + 7);
  at::Tensor x = at::randn(sizes, generator) * 2;
  std::vector<int64_t> per_channel(sizes.size(), 1);
  per_channel[1] = kChannels;
  x += offset.view(per_channel);
  x = x.to(shape.type);
  return shape.channels_last ? x.contiguous(at::MemoryFormat::ChannelsLast) : x;
}

// A gradient for every output element, as from some loss over the whole batch.
at::Tensor output_gradient(const at::Tensor& x) {
  at::Generator generator = at::detail::createCPUGenerator(99);
  return (at::randn(x.sizes(), generator) + 0.5).to(x.scalar_type());
}

template <class BatchNorm>
RankResult train(BatchNorm& norm, const std::vector<at::Tensor>& inputs,
                 const std::vector<at::Tensor>& gradients) {
  RankResult result;
  for (size_t i = 0; i < inputs.size(); ++i) {
    norm->zero_grad();
    const at::Tensor x = inputs[i].detach().clone().requires_grad_();
    result.output = norm->forward(x);
    result.output.backward(gradients[i]);
    result.input_gradient = x.grad();
  }
  if (norm->weight.defined()) {
    result.weight_gradient = norm->weight.grad();
    result.bias_gradient = norm->bias.grad();
  }
  result.running_mean = norm->running_mean.clone();
  result.running_var = norm->running_var.clone();
  result.batches = norm->num_batches_tracked.template item<int64_t>();
  return result;
}

void fill(at::Tensor& weight, at::Tensor& bias) {
  const at::NoGradGuard no_grad;
  weight.copy_(at::linspace(0.5, 2, kChannels));
  bias.copy_(at::linspace(-1, 1, kChannels));
}

// Every rank's part of some steps, against the whole.
void compare_with_whole_batch(const BatchShape& shape, double tolerance,
                              std::optional<double> momentum = 0.1) {
  std::ostringstream name;
  name << at::IntArrayRef(shape.rows) << " rows of " << at::IntArrayRef(shape.inner) << ' '
       << shape.type << (shape.channels_last ? " channels last" : "");
  SCOPED_TRACE(name.str());
  const int ranks = static_cast<int>(shape.rows.size());
  std::vector<std::vector<at::Tensor>> inputs(shape.rows.size()), gradients(shape.rows.size());
  std::vector<at::Tensor> whole_inputs, whole_gradients;
  for (int step = 0; step < kSteps; ++step) {
    const at::Tensor x = batch_of_all(shape, step), dy = output_gradient(x);
    whole_inputs.push_back(x.to(at::kDouble));
    whole_gradients.push_back(dy.to(at::kDouble));
    int64_t row = 0;
    for (size_t r = 0; r < shape.rows.size(); ++r) {
      inputs[r].push_back(x.narrow(0, row, shape.rows[r]));
      gradients[r].push_back(dy.narrow(0, row, shape.rows[r]));
      row += shape.rows[r];
    }
  }

  // In double: the reference adds no error of its own.
  auto options = torch::nn::BatchNormOptions(kChannels).affine(shape.affine);
  if (momentum) {
    options.momentum(*momentum);
  } else {
    options.momentum({});
  }
  const auto whole = [&](auto reference) {
    if (shape.affine) fill(reference->weight, reference->bias);
    reference->to(at::kDouble);
    reference->num_batches_tracked.set_data(at::zeros({}, at::kLong));
    return train(reference, whole_inputs, whole_gradients);
  };
  const RankResult expected = shape.inner.size() == 3   ? whole(torch::nn::BatchNorm3d(options))
                              : shape.inner.size() == 2 ? whole(torch::nn::BatchNorm2d(options))
                                                        : whole(torch::nn::BatchNorm1d(options));

  std::vector<RankResult> results(shape.rows.size());
  comm::run_threads(ranks, [&](const comm::Group& group) {
    const auto rank = static_cast<size_t>(group.rank());
    SyncBatchNorm norm(kChannels, group, {.momentum = momentum, .affine = shape.affine});
    if (shape.affine) fill(norm->weight, norm->bias);
    results[rank] = train(norm, inputs[rank], gradients[rank]);
  });

  std::vector<at::Tensor> outputs, input_gradients;
  at::Tensor weight_gradient = at::zeros({kChannels}), bias_gradient = at::zeros({kChannels});
  for (const RankResult& result : results) {
    EXPECT_EQ(result.output.scalar_type(), shape.type);
    outputs.push_back(result.output);
    input_gradients.push_back(result.input_gradient);
    EXPECT_LT(difference(result.running_mean, expected.running_mean), 1e-6);
    EXPECT_LT(difference(result.running_var, expected.running_var), 1e-5);
    EXPECT_TRUE(at::equal(result.running_mean, results[0].running_mean)) << "not the same bits";
    EXPECT_TRUE(at::equal(result.running_var, results[0].running_var)) << "not the same bits";
    EXPECT_EQ(result.batches, kSteps);
    if (!shape.affine) continue;
    weight_gradient += result.weight_gradient;
    bias_gradient += result.bias_gradient;
  }
  EXPECT_LT(difference(at::cat(outputs), expected.output), tolerance);
  EXPECT_LT(difference(at::cat(input_gradients), expected.input_gradient), tolerance);
  if (!shape.affine) return;
  EXPECT_LT(difference(weight_gradient, expected.weight_gradient), tolerance);
  EXPECT_LT(difference(bias_gradient, expected.bias_gradient), tolerance);
}

class SyncBatchNormRanks : public ::testing::TestWithParam<int> {};

TEST_P(SyncBatchNormRanks, EqualsTheWholeBatch) {
  const auto ranks = static_cast<size_t>(GetParam());
  const std::vector<int64_t> equal(ranks, 5);
  std::vector<int64_t> uneven(ranks);
  for (size_t r = 0; r < ranks; ++r) uneven[r] = static_cast<int64_t>(2 * r + 1);
  std::vector<int64_t> empty_first(ranks, 4);
  if (ranks > 1) empty_first[0] = 0;
  std::vector<int64_t> one_each(ranks, 1);

  compare_with_whole_batch({.rows = equal, .inner = {7, 5}}, 1e-5);
  compare_with_whole_batch({.rows = uneven, .inner = {4, 4}}, 1e-5);
  compare_with_whole_batch({.rows = empty_first, .inner = {3, 3}}, 1e-5);
  compare_with_whole_batch({.rows = one_each, .inner = {2, 3}}, 1e-5);
  compare_with_whole_batch({.rows = equal}, 1e-5);
  compare_with_whole_batch({.rows = uneven, .inner = {9}}, 1e-5);
  compare_with_whole_batch({.rows = uneven, .inner = {2, 3, 2}}, 1e-5);
  // torch's kernels for this memory format add up in float32.
  compare_with_whole_batch({.rows = uneven, .inner = {6, 6}, .channels_last = true}, 1e-4);
  compare_with_whole_batch({.rows = equal, .inner = {6, 6}, .affine = false}, 1e-5);
  compare_with_whole_batch({.rows = uneven, .inner = {6, 6}, .type = at::kDouble}, 1e-6);
  compare_with_whole_batch({.rows = uneven, .inner = {6, 6}, .type = at::kBFloat16}, 8e-3);
}

TEST_P(SyncBatchNormRanks, AveragesCumulativelyWithoutMomentum) {
  compare_with_whole_batch(
      {.rows = std::vector<int64_t>(static_cast<size_t>(GetParam()), 3), .inner = {4}}, 1e-5,
      std::nullopt);
}

INSTANTIATE_TEST_SUITE_P(, SyncBatchNormRanks, ::testing::Values(1, 2, 3, 4));

TEST(SyncBatchNorm, OfOneRankIsTorchsBatchNorm) {
  const BatchShape shape{.rows = {8}, .inner = {5, 5}};
  const std::vector<at::Tensor> inputs = {batch_of_all(shape, 0)};
  const std::vector<at::Tensor> gradients = {output_gradient(inputs[0])};
  torch::nn::BatchNorm2d torchs(kChannels);
  SyncBatchNorm ours(kChannels);
  const RankResult expected = train(torchs, inputs, gradients);
  const RankResult actual = train(ours, inputs, gradients);
  EXPECT_LT(difference(actual.output, expected.output), 1e-6);
  EXPECT_LT(difference(actual.input_gradient, expected.input_gradient), 1e-6);
  EXPECT_LT(difference(actual.weight_gradient, expected.weight_gradient), 1e-6);
  EXPECT_LT(difference(actual.bias_gradient, expected.bias_gradient), 1e-6);
  EXPECT_LT(difference(actual.running_var, expected.running_var), 1e-6);
}

TEST(SyncBatchNorm, TakesAnExpandedGradient) {
  const at::Tensor input = batch_of_all({.rows = {4}, .inner = {3, 3}}, 0);
  SyncBatchNorm norm(kChannels);
  norm->forward(input).sum().backward();  // a gradient with strides of zero
  EXPECT_TRUE(at::equal(norm->bias.grad(), at::full({kChannels}, 4.0 * 9)));
}

TEST(SyncBatchNorm, EvalNeedsNoPeer) {
  const at::Tensor input = batch_of_all({.rows = {4}, .inner = {3, 3}}, 0);
  torch::nn::BatchNorm2d torchs(kChannels);
  torchs->forward(input);
  torchs->eval();
  const at::Tensor expected = torchs->forward(input);
  std::vector<at::Tensor> actual(2);
  comm::run_threads(2, [&](const comm::Group& group) {
    SyncBatchNorm ours = sync_batch_norm(torchs, group);
    if (group.rank() == 1) return;  // a collective would wait for this rank
    actual[0] = ours->forward(input);
    actual[1] = ours->forward(input.to(at::kBFloat16));
  });
  EXPECT_TRUE(at::equal(actual[0], expected));
  EXPECT_EQ(actual[1].scalar_type(), at::kBFloat16);
  EXPECT_LT(difference(actual[1], expected), 2e-2);

  // Without running statistics torch uses those of the batch at hand, in eval too.
  torch::nn::BatchNorm2d untracked(
      torch::nn::BatchNormOptions(kChannels).track_running_stats(false));
  untracked->eval();
  EXPECT_TRUE(at::equal(sync_batch_norm(untracked, {})->forward(input), untracked->forward(input)));
}

TEST(SyncBatchNorm, TakesOverTheStateOfTorchs) {
  torch::nn::BatchNorm3d source(torch::nn::BatchNormOptions(kChannels).eps(0.5).momentum({}));
  source->forward(batch_of_all({.rows = {4}, .inner = {2, 2, 2}}, 0));
  source->weight.set_requires_grad(false);
  fill(source->weight, source->bias);
  source->eval();
  SyncBatchNorm copy = sync_batch_norm(source, {}, "bn1");
  EXPECT_EQ(copy->options.eps, 0.5);
  EXPECT_FALSE(copy->options.momentum);
  EXPECT_FALSE(copy->is_training());
  EXPECT_FALSE(copy->weight.requires_grad());
  EXPECT_TRUE(copy->bias.requires_grad());
  const auto check_same = [](const auto& expected, const auto& actual) {
    ASSERT_EQ(expected.size(), actual.size());
    for (const auto& item : expected) {
      ASSERT_TRUE(actual.contains(item.key())) << item.key();
      EXPECT_TRUE(at::equal(item.value(), actual[item.key()])) << item.key();
      EXPECT_FALSE(item.value().is_alias_of(actual[item.key()])) << item.key() << " is shared";
    }
  };
  check_same(source->named_parameters(), copy->named_parameters());
  check_same(source->named_buffers(), copy->named_buffers());
  // The members are the registered tensors.
  EXPECT_TRUE(at::equal(copy->weight, source->weight));
  EXPECT_EQ(copy->num_batches_tracked.item<int64_t>(), 1);
}

TEST(SyncBatchNorm, CanBeClonedMovedAndHeldByAny) {
  SyncBatchNorm norm(kChannels, {}, {.momentum = 0.3, .name = "bn1"});
  const BatchShape shape{.rows = {4}, .inner = {3, 3}};
  norm->forward(batch_of_all(shape, 0));
  const auto clone = std::dynamic_pointer_cast<SyncBatchNormImpl>(norm->clone());
  ASSERT_NE(clone, nullptr);
  EXPECT_EQ(clone->options.name, "bn1");
  EXPECT_TRUE(at::equal(clone->running_var, norm->running_var));
  clone->forward(batch_of_all(shape, 1));
  EXPECT_FALSE(at::equal(clone->running_var, norm->running_var));

  norm->to(at::kDouble);
  EXPECT_EQ(norm->forward(batch_of_all(shape, 1).to(at::kDouble)).scalar_type(), at::kDouble);
  EXPECT_LT(difference(clone->running_var, norm->running_var), 1e-6);
  norm->to(at::kBFloat16);
  EXPECT_EQ(norm->forward(batch_of_all(shape, 2).to(at::kBFloat16)).scalar_type(), at::kBFloat16);

  torch::nn::Sequential sequence{SyncBatchNorm(kChannels), SyncBatchNorm(kChannels)};
  EXPECT_EQ(sequence->forward(batch_of_all(shape, 0)).dim(), 4);
  std::ostringstream text;
  text << *SyncBatchNorm(8);
  EXPECT_EQ(text.str(),
            "lockstep::nn::SyncBatchNorm(8, eps=1e-05, momentum=0.1, affine=true, "
            "track_running_stats=true, ranks=1)");
}

template <class Call>
std::string message_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(SyncBatchNorm, NamesWhatIsWrong) {
  EXPECT_THAT(message_of([] { SyncBatchNorm(0); }), HasSubstr("num_features is 0"));
  SyncBatchNorm norm(3, {}, {.name = "bn1"});
  EXPECT_THAT(message_of([&] {
                norm->forward(at::ones({2, 4, 5}));
              }),
              HasSubstr("[bn1] input is (2, 4, 5) of Float, must be (N, 3)"));
  EXPECT_THAT(message_of([&] { norm->forward(at::ones({3})); }), HasSubstr("input is (3)"));
  EXPECT_THAT(message_of([&] { norm->forward(at::ones({2, 3}, at::kLong)); }), HasSubstr("Long"));
  EXPECT_THAT(message_of([&] {
                norm->forward(at::ones({1, 3}));
              }),
              says("1 values per channel ... more than 1"));
  EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 0);
  EXPECT_THAT(message_of([&] {
                const at::Tensor x = at::rand({4, 3}).requires_grad_();
                norm->forward(x).sum().backward({}, true, /*create_graph=*/true);
              }),
              says("[bn1] ... second derivative"));
  // Ranks that are in different layers learn which.
  EXPECT_THAT(message_of([] {
                comm::run_threads(2, [](const comm::Group& group) {
                  const std::string name = group.rank() == 0 ? "bn1" : "bn2";
                  SyncBatchNorm(3, group, {.name = name})->forward(at::rand({4, 3}));
                });
              }),
              HasSubstr("bn2 moments"));
}

}  // namespace
}  // namespace lockstep::nn
