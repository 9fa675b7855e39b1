// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <functional>
#include <vector>

#include "lockstep/memory/meter.h"
#include "lockstep/nn/linear.h"
#include "lockstep/parallel/recompute/recompute.h"

namespace lockstep::parallel {
namespace {

// x + f(x), where f is wide inside.
struct WideLayer {
  torch::nn::Linear up{8, 256}, down{256, 8};
  int64_t tile = 0;  // 0: all at once

  at::Tensor inner(const at::Tensor& x) { return down(at::gelu(up(x))); }
  at::Tensor operator()(const at::Tensor& x) {
    const at::Tensor y = x * 2;
    if (tile == 0) return y + inner(y);
    return y + in_tiles([this](const at::Tensor& part, int64_t) { return inner(part); }, y,
                        {.size = tile});
  }
  std::vector<at::Tensor> gradients(const at::Tensor& x, const std::function<at::Tensor()>& run) {
    run().square().sum().backward();
    std::vector<at::Tensor> all;
    for (const at::Tensor& each : {x, up->weight, up->bias, down->weight, down->bias}) {
      all.push_back(each.grad());
      each.mutable_grad() = at::Tensor();
    }
    return all;
  }
};

void expect_close_all(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::allclose(a[i], b[i], 1e-10, 1e-10)) << i;
}

// Alone, in functions that are recomputed whole or by operator, and with parts that are not equal.
TEST(InTiles, GradientsAreThoseOfTheWhole) {
  at::manual_seed(1);
  WideLayer layer;
  layer.up->to(at::kDouble);
  layer.down->to(at::kDouble);
  const at::Tensor x = at::randn({2, 24, 8}, at::kDouble).set_requires_grad(true);
  const std::vector<std::function<at::Tensor()>> ways{
      [&] { return layer(x); },
      [&] { return recompute([&](const at::Tensor& in) { return layer(in); }, x); },
      [&] {
        return recompute([&](const at::Tensor& in) { return layer(in); }, x,
                         {.keep_products = true});
      },
      [&] {  // two of them in one function
        return recompute([&](const at::Tensor& in) { return layer(layer(in)); }, x);
      }};
  for (const auto& way : ways) {
    layer.tile = 0;
    const auto whole = layer.gradients(x, way);
    for (const int64_t tile : {1, 5, 24, 100}) {
      SCOPED_TRACE(tile);
      layer.tile = tile;
      expect_close_all(layer.gradients(x, way), whole);
    }
  }
}

// Without gradients such a layer computes in the type of its input, so the second call needs them.
TEST(InTiles, LayersOf8BitsAreTheSameInTheSecondCall) {
  at::manual_seed(2);
  nn::Linear linear(32, 32);
  const at::NoGradGuard no_grad;
  linear->weight.normal_();
  linear->bias.normal_();
  linear->float8 = true;
  const at::AutoGradMode grad(true);
  const at::Tensor x = at::randn({2, 24, 32}).set_requires_grad(true);
  const auto layer = [&](const at::Tensor& in) {
    return in_tiles(
        [&](const at::Tensor& part, int64_t) { return at::tanh(linear->forward(part)); }, in,
        {.size = 8});
  };
  const auto twice = [&](const at::Tensor& in) { return layer(layer(in)).square(); };
  const auto gradients = [&](const at::Tensor& out) {
    out.sum().backward();
    std::vector<at::Tensor> all;
    for (const at::Tensor& each : {x, linear->weight, linear->bias}) {
      all.push_back(each.grad());
      each.mutable_grad() = at::Tensor();
    }
    return all;
  };
  const auto once = gradients(twice(x));
  const auto again = gradients(recompute(twice, x));
  for (size_t i = 0; i < once.size(); ++i) EXPECT_TRUE(at::equal(once[i], again[i])) << i;
}

TEST(InTiles, WithoutGradientsTheyArePlainCalls) {
  WideLayer layer;
  layer.up->to(at::kDouble);
  layer.down->to(at::kDouble);
  const at::NoGradGuard no_grad;
  const at::Tensor x = at::randn({1, 10, 8}, at::kDouble);
  const at::Tensor whole = layer(x);
  layer.tile = 3;
  EXPECT_TRUE(at::allclose(layer(x), whole, 1e-10, 1e-10));
}

// What is wide inside is in memory for one part at a time, and nothing of it between the passes.
TEST(InTiles, PeaksDoNotGrowWithTheLength) {
  memory::Meter::install();
  WideLayer layer;
  const int64_t length = 4096, wide = length * 256 * 4;  // bytes
  const at::Tensor x = at::randn({1, length, 8}).set_requires_grad(true);
  const auto peak_of = [&](int64_t tile, bool again) {
    layer.tile = tile;
    const int64_t before = memory::Meter::current();
    memory::Meter::reset_peak();
    const auto run = [&] {
      return again ? recompute([&](const at::Tensor& in) { return layer(in); }, x) : layer(x);
    };
    layer.gradients(x, run);
    return memory::Meter::peak() - before;
  };
  for (const bool again : {false, true}) {
    EXPECT_GT(peak_of(0, again), 2 * wide);
    EXPECT_LT(peak_of(128, again), wide / 2);
  }
}

TEST(InTiles, WritesToTheInputAreFound) {
  WideLayer layer;
  const at::Tensor x = at::randn({1, 8, 8}).set_requires_grad(true);
  const at::Tensor y = x * 2;
  const at::Tensor out =
      in_tiles([&](const at::Tensor& part, int64_t) { return layer.inner(part); }, y, {.size = 2});
  {
    const at::NoGradGuard no_grad;
    y.add_(1);
  }
  EXPECT_THROW(out.sum().backward(), std::exception);
}

}  // namespace
}  // namespace lockstep::parallel
