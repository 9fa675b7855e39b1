// SPDX-License-Identifier: Apache-2.0
// 8-bit floats on CUDA: codes against torch's and the software's, products against float64.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "lockstep/nn/float8/float8.h"
#include "lockstep/nn/linear.h"

namespace lockstep::nn::float8_test {
namespace {

at::Tensor noise(at::IntArrayRef sizes, double scale = 1) {
  at::manual_seed(sizes[0]);
  return at::randn(sizes) * scale;
}

at::ScalarType type_of(Float8 kind) {
  return kind == Float8::e4m3 ? at::kFloat8_e4m3fn : at::kFloat8_e5m2;
}

TEST(Float8Cuda, CodesAreTorchsAndTheCpus) {
  ASSERT_EQ(float8_missing(at::kCUDA), "");
  for (const Float8 kind : {Float8::e4m3, Float8::e5m2}) {
    for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
      for (const auto& sizes : std::vector<std::vector<int64_t>>{
               {1, 16}, {7, 48}, {128, 64}, {129, 80}, {1000, 272}, {300, 1024}}) {
        SCOPED_TRACE(c10::str(c10::toString(type), " ", at::IntArrayRef(sizes)));
        const at::Tensor host = (noise(sizes) * at::exp(2 * noise(sizes))).to(type);
        const at::Tensor values = host.cuda(), amax = float8_amax(values);
        EXPECT_TRUE(at::equal(amax.cpu(), host.abs().max().to(at::kFloat).view({1})));
        const Float8Matrix cast = float8_cast(values, amax, kind, Float8Layout::both);
        const Float8Matrix same = float8_cast(host, amax.cpu(), kind, Float8Layout::both);
        EXPECT_TRUE(at::equal(cast.codes.cpu(), same.codes));
        EXPECT_TRUE(at::equal(cast.transposed.cpu(), same.transposed));
        EXPECT_TRUE(at::equal(cast.inverse.cpu(), same.inverse));
        EXPECT_TRUE(at::equal(float8_transpose(cast.codes), cast.transposed));
        const at::Tensor scale = at::full({1}, float8_scale(amax.item<float>(), kind)).cuda();
        const at::Tensor torchs = (values.to(at::kFloat) * scale).to(type_of(kind));
        EXPECT_TRUE(at::equal(torchs.view(at::kByte), cast.codes));
        for (const Float8Layout layout : {Float8Layout::rows, Float8Layout::transposed}) {
          const Float8Matrix part = float8_cast(values, amax, kind, layout);
          EXPECT_TRUE(layout == Float8Layout::rows ? at::equal(part.codes, cast.codes)
                                                   : at::equal(part.transposed, cast.transposed));
        }
      }
    }
  }
}

// Memory that does not begin at a multiple of 16 bytes.
TEST(Float8Cuda, Slices) {
  const at::Tensor values = noise({100, 48}).cuda().flatten().narrow(0, 3, 4752).view({99, 48});
  const Float8Matrix cast =
      float8_cast(values, float8_amax(values), Float8::e4m3, Float8Layout::both);
  const Float8Matrix same =
      float8_cast(values.cpu(), float8_amax(values.cpu()), Float8::e4m3, Float8Layout::both);
  EXPECT_TRUE(at::equal(cast.codes.cpu(), same.codes));
  EXPECT_TRUE(at::equal(cast.transposed.cpu(), same.transposed));
}

TEST(Float8Cuda, BadValuesStayBad) {
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    Linear linear(32, 32, {.bias = false, .tensors = at::TensorOptions().device(at::kCUDA)});
    linear->float8 = true;
    {
      const at::NoGradGuard no_grad;
      linear->weight.copy_(noise({32, 32}));
    }
    at::Tensor x = noise({32, 32});
    x[3][4] = bad;
    EXPECT_FALSE(linear(x.cuda()).isfinite().all().item<bool>());
  }
}

struct Outcome {
  at::Tensor out, input, weight, bias;
};

Outcome run(Linear& linear, const at::Tensor& values, const at::Tensor& gradient) {
  const at::Tensor x = values.detach().clone().set_requires_grad(true);
  const at::Tensor out = linear(x);
  out.backward(gradient);
  const auto host = [](const at::Tensor& tensor) { return tensor.detach().cpu().to(at::kDouble); };
  return {host(out), host(x.grad()), host(linear->weight.grad()), host(linear->bias.grad())};
}

// The CPU multiplies the same codes, in float32; a GPU sums with fewer bits.
TEST(Float8Cuda, LinearIsThatOfTheCpu) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    for (const int64_t rows : {16, 7, 400}) {
      SCOPED_TRACE(c10::str(c10::toString(type), " ", rows));
      Linear host(256, 384, {.tensors = at::TensorOptions().dtype(type)});
      Linear linear(256, 384, {.tensors = at::TensorOptions().dtype(type).device(at::kCUDA)});
      host->float8 = linear->float8 = true;
      {
        const at::NoGradGuard no_grad;
        host->weight.copy_(noise({384, 256}, 0.1));
        host->bias.copy_(noise({384}));
        linear->weight.copy_(host->weight);
        linear->bias.copy_(host->bias);
      }
      const at::Tensor x = noise({rows, 256}).to(type),
                       gradient = noise({rows, 384}, 1e-4).to(type);
      const Outcome expected = run(host, x, gradient);
      const Outcome found = run(linear, x.cuda(), gradient.cuda());
      const auto expect_near = [](const at::Tensor& a, const at::Tensor& b) {
        EXPECT_LT(((a - b).norm() / b.norm()).item<double>(), 5e-3);
      };
      expect_near(found.out, expected.out);
      expect_near(found.input, expected.input);
      expect_near(found.weight, expected.weight);
      expect_near(found.bias, expected.bias);
    }
  }
}

}  // namespace
}  // namespace lockstep::nn::float8_test
