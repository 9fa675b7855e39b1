// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optim/clip.h"

#include <ATen/Parallel.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>

#include <cmath>
#include <limits>

#include "lockstep/core/error.h"
#include "tests/optim/optim_support.h"

namespace lockstep::optim {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::vector<at::Tensor> with_grads(at::ScalarType type) {
  auto tensors = parameters_of_many_sizes(type);
  if (type == at::kFloat) tensors.erase(tensors.begin() + 4);  // torch has no maximum of nothing
  set_grads(tensors, tensors);
  tensors.push_back(parameter({3}, type));  // without a gradient
  return tensors;
}

std::vector<at::Tensor> copies_with_grads(const std::vector<at::Tensor>& tensors) {
  auto copies = copies_of(tensors);
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].grad().defined()) copies[i].mutable_grad() = tensors[i].grad().clone();
  }
  return copies;
}

TEST(Clip, LikeTorch) {
  for (const double limit : {0.5, 1e9}) {
    for (const auto type : {NormType::l2, NormType::max}) {
      at::manual_seed(1);
      const auto tensors = with_grads(at::kFloat), expected = copies_with_grads(tensors);
      const double norm = clip_grad_norm_(tensors, limit, {.type = type});
      const double reference =
          torch::nn::utils::clip_grad_norm_(expected, limit, type == NormType::l2 ? 2 : kInfinity);
      EXPECT_NEAR(norm, reference, 1e-6 * reference);
      for (size_t i = 0; i + 1 < tensors.size(); ++i) {
        expect_close(tensors[i].grad(), expected[i].grad());
      }
      EXPECT_FALSE(tensors.back().grad().defined());
      EXPECT_LE(grad_norm(tensors, {.type = type}), limit);
    }
  }
}

TEST(Clip, EveryType) {
  for (const auto type : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16}) {
    const auto tensors = with_grads(type);
    double squares = 0, largest = 0;
    for (const at::Tensor& tensor : tensors) {
      if (!tensor.grad().defined() || tensor.numel() == 0) continue;
      const at::Tensor exact = tensor.grad().to(at::kDouble);
      squares += exact.square().sum().item<double>();
      largest = std::max(largest, exact.abs().max().item<double>());
    }
    EXPECT_NEAR(grad_norm(tensors), std::sqrt(squares), 1e-12 * squares);
    EXPECT_EQ(grad_norm(tensors, {.type = NormType::max}), largest);
    clip_grad_norm_(tensors, 1);
    EXPECT_NEAR(grad_norm(tensors), 1, type == at::kBFloat16 ? 3e-3 : 1e-3);
  }
}

TEST(Clip, BitsDoNotDependOnThreadsOrLayout) {
  const int threads = at::get_num_threads();
  at::manual_seed(5);
  auto tensors = with_grads(at::kFloat);
  tensors.push_back(parameter({33, 40, 9, 11}));
  tensors.back().mutable_grad() = at::randn({33, 40, 9, 11});
  at::set_num_threads(1);
  const double norm = grad_norm(tensors);
  for (const int count : {2, 3}) {
    at::set_num_threads(count);
    EXPECT_EQ(grad_norm(tensors), norm);
  }
  at::set_num_threads(threads);
  at::Tensor& last = tensors.back().mutable_grad();
  last = last.contiguous(at::MemoryFormat::ChannelsLast);
  EXPECT_EQ(grad_norm(tensors), norm);
  for (const at::Tensor& tensor : tensors) {  // elsewhere in memory, and not aligned
    if (!tensor.grad().defined()) continue;
    const at::Tensor moved = at::empty({tensor.numel() + 1}).slice(0, 1).view(tensor.sizes());
    tensor.mutable_grad() = moved.copy_(tensor.grad());
  }
  EXPECT_EQ(grad_norm(tensors), norm);
}

TEST(Clip, ScalesAnyStrides) {
  const at::Tensor tensor = parameter({4, 6});
  tensor.mutable_grad() = at::ones({4, 12}).slice(1, 0, 12, 2);
  EXPECT_EQ(clip_grad_norm_(std::vector{tensor}, 1), std::sqrt(24.0));
  expect_close(tensor.grad(), at::full({4, 6}, 1 / std::sqrt(24.0)));
}

TEST(Clip, SparseGradientsCountOnceForEachElement) {
  const at::Tensor tensor = parameter({5, 2});
  const at::Tensor indices = at::tensor({1, 4, 1}, at::kLong).unsqueeze(0);
  tensor.mutable_grad() = at::sparse_coo_tensor(indices, at::ones({3, 2}), {5, 2});
  const double norm = std::sqrt(2 * 4 + 2 * 1);
  EXPECT_DOUBLE_EQ(clip_grad_norm_(std::vector{tensor}, 1), norm);
  ASSERT_TRUE(tensor.grad().is_sparse());
  const at::Tensor expected = at::zeros({5, 2});
  expected[1].fill_(2 / norm);
  expected[4].fill_(1 / norm);
  expect_close(tensor.grad().to_dense(), expected);
  clip_grad_value_(std::vector{tensor}, 0.4);
  EXPECT_EQ(tensor.grad().to_dense().max().item<float>(), 0.4f);
}

// As Module::parameters() lists a parameter that two modules share.
TEST(Clip, TiedParametersCountOnce) {
  const at::Tensor tied = parameter({4}), other = parameter({4});
  tied.mutable_grad() = at::full({4}, 3.0);
  other.mutable_grad() = at::full({4}, 4.0);
  const std::vector all{tied, other, tied};
  EXPECT_DOUBLE_EQ(grad_norm(all), 10);
  EXPECT_DOUBLE_EQ(grad_norm(all, {.exact = true}), 10);
  EXPECT_DOUBLE_EQ(clip_grad_norm_(all, 5), 10);
  expect_close(tied.grad(), at::full({4}, 1.5));
  expect_close(other.grad(), at::full({4}, 2.0));
}

TEST(Clip, TakesAModuleOrItsHolder) {
  torch::nn::Linear model(4, 1);
  model->weight.mutable_grad() = at::full({1, 4}, 1.5);
  model->bias.mutable_grad() = at::full({1}, 4.0);
  EXPECT_DOUBLE_EQ(clip_grad_norm_(*model, 2.5), 5);
  expect_close(model->bias.grad(), at::full({1}, 2.0));
  EXPECT_NEAR(clip_grad_norm_(model, 1.25), 2.5, 1e-5);
  expect_close(model->bias.grad(), at::full({1}, 1.0));
}

TEST(Clip, SmallGradientsAreNotTouched) {
  const at::Tensor tensor = parameter({100});
  tensor.mutable_grad() = at::randn({100});
  const at::Tensor before = tensor.grad().clone();
  clip_grad_norm_(std::vector{tensor}, 1000);
  EXPECT_TRUE(same_bits(tensor.grad(), before));
  EXPECT_EQ(grad_norm(std::vector<at::Tensor>{}), 0);
}

TEST(Clip, WithTheNormOfTheWholeModel) {
  const at::Tensor tensor = parameter({4});
  tensor.mutable_grad() = at::ones({4});
  clip_grad_with_norm(std::vector{tensor}, 1, 10);
  expect_close(tensor.grad(), at::full({4}, 0.1));
}

TEST(Clip, NormThatIsNotFinite) {
  for (const double bad : {kInfinity, -kInfinity, std::nan("")}) {
    for (const auto type : {NormType::l2, NormType::max}) {
      for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
        const at::Tensor tensor = parameter({100}, dtype);
        tensor.mutable_grad() = at::ones({100}, dtype);
        const std::vector<at::Tensor> tensors = {tensor, parameter({5}, dtype)};
        tensors[1].mutable_grad() = at::ones({5}, dtype);
        tensor.grad()[77].fill_(bad);
        const at::Tensor before = tensor.grad().clone();
        expect_error<Error>("[grad_norm] ... norm ... gradients", [&] {
          clip_grad_norm_(tensors, 1, {.type = type, .error_if_nonfinite = true});
        });
        EXPECT_TRUE(tensor.grad()[0].eq(before[0]).item<bool>());
        const double norm = clip_grad_norm_(tensors, 1, {.type = type});
        EXPECT_EQ(std::isnan(norm), std::isnan(bad));
        EXPECT_FALSE(std::isfinite(norm));
        const auto first = tensor.grad()[0].item<double>();  // as torch does
        EXPECT_TRUE(std::isnan(bad) ? std::isnan(first) : first == 0) << first;
      }
    }
  }
}

TEST(Clip, ClipGradValueClampsElements) {
  const at::Tensor tensor = parameter({3});
  tensor.mutable_grad() = at::tensor({-2.0f, 0.5f, 3.0f});
  clip_grad_value_(std::vector{tensor}, 1);
  EXPECT_TRUE(same_bits(tensor.grad(), at::tensor({-1.0f, 0.5f, 1.0f})));
}

TEST(Clip, BadInputIsNamed) {
  const std::vector<at::Tensor> tensors = {parameter({1})};
  expect_error<ConfigError>("[clip_grad_norm_] ... max_norm is -1 ... at least 0",
                            [&] { clip_grad_norm_(tensors, -1); });
  expect_error<ConfigError>("[clip_grad_value_] ... max_value is nan ... at least 0",
                            [&] { clip_grad_value_(tensors, std::nan("")); });
}

}  // namespace
}  // namespace lockstep::optim
