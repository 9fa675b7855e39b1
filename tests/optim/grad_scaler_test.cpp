// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optim/grad_scaler.h"

#include <atomic>
#include <cmath>
#include <limits>

#include "lockstep/core/error.h"
#include "lockstep/optim/adamw.h"
#include "lockstep/optim/clip.h"
#include "lockstep/optim/sgd.h"
#include "lockstep/optim/step_guard.h"
#include "tests/optim/optim_support.h"

namespace lockstep::optim {
namespace {

constexpr float kOverflow = std::numeric_limits<float>::infinity();

TEST(GradScaler, DividesWhatItMultiplied) {
  const at::Tensor tensor = parameter({50}), plain = copy_of(tensor);
  SGD optimizer({{"p", tensor}}, {.lr = 0.5}), reference({{"p", plain}}, {.lr = 0.5});
  GradScaler scaler;
  scaler.scale(tensor.square().sum()).backward();
  plain.square().sum().backward();
  EXPECT_TRUE(same_bits(tensor.grad(), plain.grad() * 65536));
  scaler.unscale(optimizer);
  EXPECT_TRUE(same_bits(tensor.grad(), plain.grad()));  // a power of two is exact
  EXPECT_TRUE(scaler.step(optimizer));
  scaler.update();
  reference.step();
  EXPECT_TRUE(same_bits(tensor, plain));
}

TEST(GradScaler, ScaleGrowsAndShrinks) {
  const at::Tensor tensor = parameter({2});
  SGD optimizer({{"p", tensor}});
  GradScaler scaler(
      {}, {.init_scale = 8, .growth_factor = 4, .backoff_factor = 0.25, .growth_interval = 3});
  std::vector<double> scales;
  for (const float gradient : {1.f, 1.f, 1.f, 1.f, kOverflow, 1.f, 1.f, NAN, 1.f, 1.f, 1.f}) {
    const at::Tensor before = tensor.detach().clone();
    tensor.mutable_grad() = at::full({2}, gradient);
    EXPECT_EQ(scaler.step(optimizer), std::isfinite(gradient));
    EXPECT_EQ(same_bits(tensor, before), !std::isfinite(gradient));
    scaler.update();
    scales.push_back(scaler.scale());
  }
  EXPECT_EQ(scales, (std::vector<double>{8, 8, 32, 32, 8, 8, 8, 2, 2, 2, 8}));
  EXPECT_EQ(scaler.skipped_steps(), 2);
}

TEST(GradScaler, ScaleStaysFinite) {
  const at::Tensor tensor = parameter({1});
  SGD optimizer({{"p", tensor}});
  GradScaler scaler({}, {.init_scale = std::ldexp(1.0, 127), .growth_interval = 1});
  tensor.mutable_grad() = at::ones({1});
  scaler.step(optimizer);
  scaler.update();
  EXPECT_EQ(scaler.scale(), std::ldexp(1.0, 127));
}

TEST(GradScaler, SmallFloat16GradientsSurvive) {
  const at::Tensor tensor = parameter({4}, at::kHalf);
  SGD optimizer({{"p", tensor}}, {.lr = 1});
  const at::Tensor before = tensor.detach().to(at::kFloat);
  GradScaler scaler;
  tensor.mutable_grad() = at::full({4}, std::ldexp(1.0, -14), at::kHalf);  // of the scaled loss
  EXPECT_TRUE(scaler.step(optimizer));
  EXPECT_TRUE(same_bits(tensor.grad(), at::full({4}, std::ldexp(1.0, -30))));
  expect_close(entry(optimizer.state(), "p.master"), before - std::ldexp(1.0, -30), 1e-12);
}

TEST(GradScaler, AllRanksSkipOrNone) {
  constexpr int kRanks = 3;
  std::atomic<int> stepped = 0, wrong = 0;
  comm::run_threads(kRanks, [&](const comm::Group& group) {
    const at::Tensor tensor = parameter({40000});
    AdamW optimizer({{"p", tensor}});
    GradScaler scaler(group, {.init_scale = 4});
    for (int step = 0; step < 6; ++step) {
      tensor.mutable_grad() = at::ones({40000});
      const bool overflows = step % 2 == 1;
      if (overflows && group.rank() == step / 2) tensor.grad()[39999].fill_(kOverflow);
      if (step < 3) scaler.unscale(optimizer);
      const at::Tensor before = tensor.detach().clone();
      const bool done = scaler.step(optimizer);
      if (done == overflows || done == same_bits(tensor, before)) ++wrong;
      if (done) ++stepped;
      scaler.update();
    }
    if (scaler.scale() != 0.5 || scaler.skipped_steps() != 3) ++wrong;
  });
  EXPECT_EQ(stepped, 3 * kRanks);
  EXPECT_EQ(wrong, 0);
}

TEST(GradScaler, OneOptimizerOfTwoOverflows) {
  const at::Tensor good = parameter({3}), bad = parameter({3});
  SGD first({{"p", good}}), second({{"p", bad}});
  GradScaler scaler({}, {.init_scale = 2});
  good.mutable_grad() = at::ones({3});
  bad.mutable_grad() = at::full({3}, kOverflow);
  EXPECT_TRUE(scaler.step(first));
  EXPECT_FALSE(scaler.step(second));
  scaler.update();
  EXPECT_EQ(scaler.scale(), 1);
}

TEST(GradScaler, StateRoundTrip) {
  const at::Tensor tensor = parameter({1});
  SGD optimizer({{"p", tensor}});
  GradScaler scaler({}, {.growth_interval = 2}), resumed({}, {.growth_interval = 2});
  const auto iterate = [&](GradScaler& one) {
    tensor.mutable_grad() = at::ones({1});
    one.step(optimizer);
    one.update();
  };
  for (int step = 0; step < 3; ++step) iterate(scaler);
  resumed.load_state(scaler.state());
  EXPECT_EQ(resumed.scale(), 131072);
  iterate(resumed);
  EXPECT_EQ(resumed.scale(), 262144);
  EXPECT_EQ(scaler.state()[0].name, "grad_scaler.scale");
  expect_error<ConfigError>("[GradScaler.load_state] 'grad_scaler.growth_tracker' is missing", [&] {
    resumed.load_state(std::vector<NamedTensor>{scaler.state()[0]});
  });
}

TEST(GradScaler, GrowsWhereMoreStepsWereCountedThanItWaitsFor) {
  GradScaler scaler({}, {.init_scale = 2, .growth_interval = 3});
  const at::Tensor steps = at::full({}, 10, at::kLong);
  scaler.load_state(std::vector<NamedTensor>{scaler.state()[0], {scaler.state()[1].name, steps}});
  const at::Tensor tensor = parameter({1});
  SGD optimizer({{"p", tensor}});
  tensor.mutable_grad() = at::ones({1});
  scaler.step(optimizer);
  scaler.update();
  EXPECT_EQ(scaler.scale(), 4);
}

TEST(GradScaler, OrderOfCallsAndOptionsAreChecked) {
  const at::Tensor tensor = parameter({1});
  SGD optimizer({{"p", tensor}});
  tensor.mutable_grad() = at::ones({1});
  GradScaler scaler;
  expect_error<ConfigError>("[GradScaler] update without gradients", [&] { scaler.update(); });
  scaler.unscale(optimizer);
  expect_error<ConfigError>("[GradScaler] ... unscaled already",
                            [&] { scaler.unscale(optimizer); });
  scaler.step(optimizer);
  expect_error<ConfigError>("[GradScaler] ... step ... twice", [&] { scaler.step(optimizer); });
  scaler.update();
  scaler.step(optimizer);
  const auto with = [](GradScalerOptions options) { GradScaler bad({}, options); };
  expect_error<ConfigError>("init_scale is 0, must be above 0", [&] { with({.init_scale = 0}); });
  expect_error<ConfigError>("growth_factor is 1, must be above 1",
                            [&] { with({.growth_factor = 1}); });
  expect_error<ConfigError>("backoff_factor is 1, must be between 0 and 1",
                            [&] { with({.backoff_factor = 1}); });
  expect_error<ConfigError>("growth_interval is 0 ... at least 1",
                            [&] { with({.growth_interval = 0}); });
}

TEST(StepGuard, AllRanksSkipOrNone) {
  std::atomic<int> wrong = 0;
  comm::run_threads(2, [&](const comm::Group& group) {
    const at::Tensor tensor = parameter({20000});
    SGD optimizer({{"p", tensor}});
    StepGuard guard(group);
    for (int step = 0; step < 4; ++step) {
      tensor.mutable_grad() = at::ones({20000});
      const bool bad = step % 2 == 0;
      if (bad && group.rank() == step / 2) tensor.grad()[19999].fill_(step == 0 ? NAN : kOverflow);
      const at::Tensor before = tensor.detach().clone();
      const bool done = step < 2
                            ? guard.step(optimizer)
                            : guard.step(optimizer, clip_grad_norm_(optimizer.parameters(), 1));
      if (done == bad || done == same_bits(tensor, before)) ++wrong;
    }
    if (guard.skipped_steps() != 2) ++wrong;
  });
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace lockstep::optim
