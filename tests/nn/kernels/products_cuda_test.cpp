// SPDX-License-Identifier: Apache-2.0
// Products by the algorithms that were fastest, against float64 on the CPU.

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <gtest/gtest.h>

#include "lockstep/nn/float8/float8.h"
#include "lockstep/nn/kernels/product_cuda.h"
#include "lockstep/nn/linear.h"

namespace lockstep::nn {
namespace {

struct Products : testing::Test {
  Products() { time_products(true); }
  ~Products() override { time_products(false); }
};

at::Tensor random_matrix(at::IntArrayRef sizes, at::ScalarType type = at::kBFloat16) {
  return at::randn(sizes, at::device(at::kCUDA)).to(type);
}

void expect_close(const at::Tensor& found, const at::Tensor& expected, double tolerance = 1e-2) {
  const at::Tensor exact = expected.to(at::kDouble).cpu();
  EXPECT_EQ(found.sizes(), exact.sizes());
  const double largest = exact.abs().max().item<double>();
  EXPECT_LE((found.to(at::kDouble).cpu() - exact).abs().max().item<double>(), tolerance * largest);
}

at::Tensor in_double(const at::Tensor& tensor) { return tensor.cpu().to(at::kDouble); }

TEST_F(Products, OfAllOrdersInMemory) {
  at::manual_seed(1);
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf}) {
    for (const bool a_turned : {false, true}) {
      for (const bool b_turned : {false, true}) {
        const at::Tensor a =
            a_turned ? random_matrix({512, 272}, type).t() : random_matrix({272, 512}, type);
        const at::Tensor b =
            b_turned ? random_matrix({96, 512}, type).t() : random_matrix({512, 96}, type);
        const auto out = cuda::timed_product(a, b, {.type = type});
        ASSERT_TRUE(out.has_value());
        expect_close(*out, in_double(a).mm(in_double(b)));
        expect_close(at::mm(a, b), in_double(a).mm(in_double(b)));
        const at::Tensor bias = random_matrix({96}, type), added = random_matrix({272, 96}, type);
        expect_close(at::addmm(bias, a, b), in_double(a).mm(in_double(b)) + in_double(bias));
        expect_close(at::addmm(added, a, b), in_double(a).mm(in_double(b)) + in_double(added));
        expect_close(at::addmm(added, a, b, 0.5, 2),
                     2 * in_double(a).mm(in_double(b)) + in_double(added) / 2);
      }
    }
  }
}

// Part of a larger matrix; sizes and addresses that cuBLASLt does not take are for torch.
TEST_F(Products, OfOtherTensors) {
  const at::Tensor large = random_matrix({300, 640}), b = random_matrix({256, 64});
  const at::Tensor part = large.slice(1, 128, 384);
  EXPECT_TRUE(cuda::timed_product(part, b, {}).has_value());
  expect_close(at::mm(part, b), in_double(part).mm(in_double(b)));
  const at::Tensor odd = large.slice(1, 1, 257), flat = random_matrix({256 * 64 + 1}).slice(0, 1);
  for (const auto& [x, y] : {std::pair(odd, b),
                             {part, flat.view({256, 64})},
                             {part, random_matrix({256, 7})},
                             {part.to(at::kFloat), b.to(at::kFloat)},
                             {random_matrix({3, 256}), b}}) {
    EXPECT_FALSE(cuda::timed_product(x, y, {}).has_value());
    expect_close(at::mm(x, y), in_double(x).mm(in_double(y)));
  }
  EXPECT_THROW(at::mm(part, b.to(at::kHalf)), c10::Error);
  EXPECT_THROW(at::mm(part, random_matrix({128, 64})), c10::Error);
  EXPECT_EQ(at::mm(random_matrix({0, 256}), b).size(0), 0);
}

// Forward, and both products of backward; the strides of gradients are those of torch.
TEST_F(Products, OfALayerAndItsBackward) {
  for (const bool bias : {false, true}) {
    const auto options = at::device(at::kCUDA).dtype(at::kBFloat16);
    Linear layer(128, 192, {.bias = bias, .tensors = options});
    layer->weight.data().copy_(random_matrix({192, 128}));
    if (bias) layer->bias.data().copy_(random_matrix({192}));
    const at::Tensor x = random_matrix({4, 64, 128}).set_requires_grad(true),
                     g = random_matrix({4, 64, 192});
    layer(x).backward(g);
    at::Tensor y = in_double(x).detach().set_requires_grad(true),
               w = in_double(layer->weight).detach();
    w.set_requires_grad(true);
    const at::Tensor out = at::linear(y, w, bias ? in_double(layer->bias).detach() : at::Tensor());
    out.backward(in_double(g));
    expect_close(layer(x).detach(), out.detach());
    expect_close(x.grad(), y.grad());
    expect_close(layer->weight.grad(), w.grad());
    EXPECT_TRUE(layer->weight.grad().is_contiguous());
  }
}

// The sum of a product and what goes around it, and gradients of both.
TEST_F(Products, AddWhatGoesAroundThem) {
  for (const bool in_8_bits : {false, true}) {
    if (in_8_bits && !float8_missing({at::kCUDA, 0}).empty()) continue;
    const auto options = at::device(at::kCUDA).dtype(at::kBFloat16);
    Linear layer(128, 192, {.bias = false, .tensors = options});
    layer->weight.data().copy_(random_matrix({192, 128}));
    layer->float8 = in_8_bits;
    const at::Tensor g = random_matrix({4, 64, 192});
    const at::Tensor values = random_matrix({4, 64, 128}), stream = random_matrix({4, 64, 192});
    const auto results = [&](bool fused) {
      const at::Tensor x = values.clone().set_requires_grad(true);
      const at::Tensor around = stream.clone().set_requires_grad(true);
      const at::Tensor out = fused ? layer->add_to(around, x) : around + layer(x);
      layer->weight.mutable_grad().reset();
      out.backward(g);
      return std::vector{out.detach(), x.grad(), around.grad(), layer->weight.grad().clone()};
    };
    const auto found = results(true), expected = results(false);
    for (size_t i = 0; i < found.size(); ++i) expect_close(found[i], expected[i]);
  }
}

// Micro-batches after the first add to the sum in place: once each, also where sizes are timed.
TEST_F(Products, AddGradientsOfWeights) {
  for (const bool in_8_bits : {false, true}) {
    if (in_8_bits && !float8_missing({at::kCUDA, 0}).empty()) continue;
    for (const bool timed : {false, true}) {
      const auto options = at::device(at::kCUDA).dtype(at::kBFloat16);
      Linear layer(144, 208, {.bias = false, .tensors = options});
      layer->weight.data().copy_(random_matrix({208, 144}));
      layer->float8 = in_8_bits;
      const at::Tensor x = random_matrix({4, 64, 144}), g = random_matrix({4, 64, 208});
      layer(x).backward(g);
      const at::Tensor one = in_double(layer->weight.grad());
      layer->adds_gradient = true;
      time_products(timed);
      const void* const place = layer->weight.grad().data_ptr();
      const auto version = layer->weight.grad()._version();
      for (int i = 2; i <= 4; ++i) {
        layer(x).backward(g);
        expect_close(layer->weight.grad(), one * i);
        EXPECT_EQ(layer->weight.grad().data_ptr(), place);
      }
      EXPECT_EQ(layer->weight.grad()._version(), version + 3);
      time_products(true);
    }
  }
}

TEST_F(Products, OfEightBitFloats) {
  const c10::Device device(at::kCUDA, 0);
  if (!float8_missing(device).empty()) GTEST_SKIP() << float8_missing(device);
  const auto cast = [](const at::Tensor& matrix, Float8 kind) {
    return float8_cast(matrix, float8_amax(matrix), kind, Float8Layout::rows);
  };
  const at::Tensor bias = random_matrix({96});
  const Float8Matrix weight = cast(random_matrix({96, 256}), Float8::e4m3);
  for (const Float8 kind : {Float8::e4m3, Float8::e5m2}) {
    const Float8Matrix x = cast(random_matrix({272, 256}), kind);
    for (const at::Tensor& added : {at::Tensor(), bias}) {
      const auto product = [&] {
        return float8_product({x.codes, x.inverse, kind}, {weight.codes, weight.inverse},
                              {.type = at::kBFloat16, .bias = added});
      };
      const at::Tensor found = product();
      time_products(false);
      expect_close(found, product());
      time_products(true);
    }
  }
}

// What was timed before is used in a graph; new sizes are torch's there.
TEST_F(Products, InAGraph) {
  const at::Tensor a = random_matrix({256, 128}), b = random_matrix({128, 512}),
                   c = random_matrix({512, 48});
  at::mm(a, b);
  at::mm(random_matrix({256, 512}), random_matrix({512, 512}));  // torch's own workspace
  const auto stream = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStreamGuard guard(stream);
  at::mm(a, b).mm(random_matrix({512, 512}));
  stream.synchronize();
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  const at::Tensor out = at::mm(at::mm(a, b), c);
  graph.capture_end();
  a.mul_(2);
  graph.replay();
  stream.synchronize();
  expect_close(out, in_double(a).mm(in_double(b)).mm(in_double(c)), 2e-2);
}

TEST_F(Products, AreTorchsWhereRunsMustBeAlike) {
  const at::Tensor a = random_matrix({1024, 768}), b = random_matrix({768, 512});
  time_products(false);
  const at::Tensor expected = at::mm(a, b);
  time_products(true);
  at::globalContext().setDeterministicAlgorithms(true, false);
  EXPECT_FALSE(cuda::products_are_timed(a.device()));
  const at::Tensor found = at::mm(a, b);
  at::globalContext().setDeterministicAlgorithms(false, false);
  EXPECT_TRUE(at::equal(found, expected));
}

}  // namespace
}  // namespace lockstep::nn
