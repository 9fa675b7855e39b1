// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optim/autocast.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>

#include "lockstep/core/error.h"
#include "tests/optim/optim_support.h"

namespace lockstep::optim {
namespace {

// Small, because matrix products in bfloat16 work on any processor only up to 16 x 16.
at::ScalarType type_of_product() {
  return at::mm(at::ones({4, 4}), at::ones({4, 4})).scalar_type();
}

TEST(Autocast, HoldsForTheScope) {
  EXPECT_EQ(type_of_product(), at::kFloat);
  {
    const AutocastGuard guard({.device = at::kCPU, .dtype = at::kBFloat16});
    EXPECT_EQ(type_of_product(), at::kBFloat16);
    {
      const AutocastGuard off({.enabled = false});
      EXPECT_EQ(type_of_product(), at::kFloat);
    }
    EXPECT_EQ(type_of_product(), at::kBFloat16);
  }
  EXPECT_EQ(type_of_product(), at::kFloat);
}

TEST(Autocast, TypeIsThatOfTheInnermostScope) {
  const auto type = [] { return at::autocast::get_lower_precision_fp_from_device_type(at::kCUDA); };
  const at::ScalarType before = type();
  {
    const AutocastGuard outer({.device = at::kCUDA, .dtype = at::kHalf});
    EXPECT_EQ(type(), at::kHalf);
    {
      const AutocastGuard inner({.device = at::kCUDA, .dtype = at::kBFloat16});
      EXPECT_EQ(type(), at::kBFloat16);
    }
    EXPECT_EQ(type(), at::kHalf);
  }
  EXPECT_EQ(type(), before);
}

TEST(Autocast, EndsWithAnException) {
  try {
    const AutocastGuard guard({});
    throw Error("left");
  } catch (const Error&) {
  }
  EXPECT_EQ(type_of_product(), at::kFloat);
}

TEST(Autocast, OtherDevicesAreNotConcerned) {
  const AutocastGuard guard({.device = at::kCUDA, .dtype = at::kHalf});
  EXPECT_EQ(type_of_product(), at::kFloat);
}

TEST(Autocast, WeightsAreCastOnceInAnOutermostScope) {
  const at::Tensor weight = at::ones({4, 4}).requires_grad_(), input = at::ones({4, 4});
  const auto product = [&] { return at::mm(input, weight).sum().item<float>(); };
  const auto set_weight = [&](double value) {
    const at::NoGradGuard no_grad;
    weight.fill_(value);
  };
  {
    const AutocastGuard guard({});
    EXPECT_EQ(product(), 64);
    { const AutocastGuard inner({}); }
    set_weight(2);
    EXPECT_EQ(product(), 64);  // the kept cast: its end must drop it
  }
  {
    const AutocastGuard guard({});
    EXPECT_EQ(product(), 128);
  }
}

TEST(Autocast, GradientsComeInTheParametersType) {
  const at::Tensor weight = at::ones({4, 4}).requires_grad_();
  at::Tensor loss;
  {
    const AutocastGuard guard({});
    loss = at::mm(at::ones({4, 4}), weight).to(at::kFloat).sum();
  }
  loss.backward();
  EXPECT_EQ(weight.grad().scalar_type(), at::kFloat);
  EXPECT_EQ(weight.grad().sum().item<float>(), 64);
}

TEST(Autocast, BadInputIsNamed) {
  expect_error<ConfigError>("[autocast] dtype is Float, must be bfloat16 or float16",
                            [] { AutocastGuard guard({.dtype = at::kFloat}); });
  expect_error<ConfigError>("[autocast] ... device is meta ... cpu or cuda",
                            [] { AutocastGuard guard({.device = at::kMeta}); });
  EXPECT_EQ(type_of_product(), at::kFloat);
}

}  // namespace
}  // namespace lockstep::optim
