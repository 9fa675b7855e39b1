// SPDX-License-Identifier: Apache-2.0
// 8-bit floats: codes and roundings from tables of torch, products against float64.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/nn/float8/float8.h"
#include "lockstep/nn/float8/float8_linear.h"
#include "lockstep/nn/kernels/amax_note.h"
#include "lockstep/nn/linear.h"

namespace lockstep::nn::float8_test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

at::Tensor noise(at::IntArrayRef sizes, double scale = 1) {
  at::manual_seed(sizes[0]);
  return at::randn(sizes) * scale;
}

// Values of codes with their scale, in float64.
at::Tensor values_of(const at::Tensor& codes, const at::Tensor& inverse, Float8 kind) {
  at::Tensor values = at::empty(codes.sizes(), at::kDouble);
  for (int64_t i = 0; i < codes.numel(); ++i) {
    values.data_ptr<double>()[i] =
        decode_float8(codes.data_ptr<uint8_t>()[i], kind) * inverse.item<double>();
  }
  return values;
}
at::Tensor rounded(const at::Tensor& matrix, Float8 kind) {
  const Float8Matrix cast = float8_cast(matrix, float8_amax(matrix), kind, Float8Layout::rows);
  return values_of(cast.codes, cast.inverse, kind);
}

double relative_error(const at::Tensor& a, const at::Tensor& b) {
  return ((a.to(at::kDouble) - b).norm() / b.norm()).item<double>();
}

TEST(Float8, EveryCodeIsWhatItsValueRoundsTo) {
  for (const Float8 kind : {Float8::e4m3, Float8::e5m2}) {
    float before = -kInfinity;
    for (int i = 0; i < 256; ++i) {
      const auto code = static_cast<uint8_t>(i);
      const float value = decode_float8(code, kind);
      if (std::isnan(value)) {
        EXPECT_TRUE(std::isnan(decode_float8(encode_float8(value, kind), kind))) << i;
      } else if (std::isinf(value)) {
        EXPECT_EQ(encode_float8(value, kind) & 0x7F, format_of(kind).largest_code);
      } else {
        EXPECT_EQ(encode_float8(value, kind), code);
        EXPECT_EQ(std::signbit(value), i >= 128);
        if (i > 0 && i < 128) {
          EXPECT_GT(value, before);
        }
      }
      before = value;
    }
  }
  EXPECT_EQ(decode_float8(0x7E, Float8::e4m3), 448);
  EXPECT_EQ(decode_float8(0x7B, Float8::e5m2), 57344);
  EXPECT_EQ(decode_float8(0x01, Float8::e4m3), std::ldexp(1.0F, -9));
  EXPECT_EQ(decode_float8(0x08, Float8::e4m3), std::ldexp(1.0F, -6));
  EXPECT_EQ(decode_float8(0x01, Float8::e5m2), std::ldexp(1.0F, -16));
  EXPECT_EQ(decode_float8(0x04, Float8::e5m2), std::ldexp(1.0F, -14));
}

TEST(Float8, RoundsToNearestEvenAndSaturates) {
  const std::vector<std::pair<float, float>> e4m3 = {
      {1.0625F, 1},         {1.1875F, 1.25F}, {17, 16},          {19, 20},
      {0.1F, 0.1015625F},   {3.3F, 3.25F},    {0x1p-10F, 0},     {0x1.8p-9F, 0x1p-8F},
      {0x1.4p-8F, 0x1p-8F}, {449, 448},       {464, 448},        {1e30F, 448},
      {-500, -448},         {kInfinity, 448}, {-kInfinity, -448}};
  for (const auto& [value, wanted] : e4m3)
    EXPECT_EQ(decode_float8(encode_float8(value, Float8::e4m3), Float8::e4m3), wanted) << value;
  const std::vector<std::pair<float, float>> e5m2 = {
      {1.125F, 1},    {1.375F, 1.5F}, {0.1F, 0.09375F},
      {3.3F, 3.5F},   {0x1p-17F, 0},  {0x1.8p-16F, 0x1p-15F},
      {61439, 57344}, {1e30F, 57344}, {-kInfinity, -57344}};
  for (const auto& [value, wanted] : e5m2)
    EXPECT_EQ(decode_float8(encode_float8(value, Float8::e5m2), Float8::e5m2), wanted) << value;
  EXPECT_EQ(encode_float8(-0.0F, Float8::e4m3), 0x80);
}

TEST(Float8, CastsWithTheScaleOfTheLargest) {
  const at::Tensor row = at::tensor({0.3F, -1.7F, 2.5F, 0.01F, -0.002F, 0.75F}).view({1, 6});
  const auto codes = [&](Float8 kind) {
    const Float8Matrix cast = float8_cast(row, float8_amax(row), kind, Float8Layout::both);
    EXPECT_EQ(cast.transposed.sizes(), (std::vector<int64_t>{6, 16}));
    EXPECT_TRUE(at::equal(cast.transposed.select(1, 0), cast.codes[0]));
    EXPECT_TRUE(at::equal(cast.transposed, float8_transpose(cast.codes)));
    EXPECT_EQ(cast.transposed.narrow(1, 1, 15).count_nonzero().item<int64_t>(), 0);
    const auto* data = cast.codes.data_ptr<uint8_t>();
    return std::vector<int>(data, data + 6);
  };
  EXPECT_EQ(codes(Float8::e4m3), (std::vector<int>{0x65, 0xFA, 0x7E, 0x3E, 0xAB, 0x70}));
  EXPECT_EQ(codes(Float8::e5m2), (std::vector<int>{0x6F, 0xF9, 0x7B, 0x5B, 0xD2, 0x74}));
  EXPECT_EQ(rounded(at::zeros({1, 16}), Float8::e4m3).abs().max().item<double>(), 0);
  EXPECT_TRUE(std::isnan(float8_amax(at::tensor({1.0F, kNaN, kInfinity})).item<float>()));
}

TEST(Float8, ProductIsThatOfTheDecodedValues) {
  const at::Tensor a = noise({7, 64}, 1e-3), b = noise({48, 64}, 30), bias = noise({48});
  const Float8Matrix x = float8_cast(a, float8_amax(a), Float8::e5m2, Float8Layout::rows);
  const Float8Matrix w = float8_cast(b, float8_amax(b), Float8::e4m3, Float8Layout::rows);
  const at::Tensor out =
      float8_product({x.codes, x.inverse, x.kind}, {w.codes, w.inverse, w.kind}, {.bias = bias});
  const at::Tensor exact =
      rounded(a, Float8::e5m2).mm(rounded(b, Float8::e4m3).t()) + bias.to(at::kDouble);
  EXPECT_LT(relative_error(out, exact), 1e-6);
  const at::Tensor c = at::tensor({0.3F, -1.7F, 2.5F, 0.01F}).view({1, 4});
  const at::Tensor d = at::tensor({1.2F, 0.4F, -0.6F, 2.0F}).view({1, 4});
  EXPECT_NEAR(rounded(c, Float8::e4m3).mm(rounded(d, Float8::e4m3).t()).item<double>(), -1.778938,
              1e-6);
}

struct Gradients {
  at::Tensor out, input, weight, bias;
};

Gradients run(Linear& linear, const at::Tensor& values, const at::Tensor& gradient) {
  const at::Tensor x = values.detach().clone().set_requires_grad(true);
  for (at::Tensor& each : linear->parameters()) each.mutable_grad().reset();
  const at::Tensor out = linear(x);
  out.backward(gradient);
  return {out.detach(), x.grad(), linear->weight.grad(),
          linear->bias.defined() ? linear->bias.grad() : at::Tensor()};
}

Linear noisy_linear(int64_t in, int64_t out) {
  Linear linear(in, out);
  const at::NoGradGuard no_grad;
  linear->weight.copy_(noise({out, in}, 0.1));
  linear->bias.copy_(noise({out}));
  return linear;
}

TEST(Float8, ThreeProductsOfALinearLayer) {
  Linear linear = noisy_linear(32, 48);
  const at::Tensor x = noise({3, 5, 32}), gradient = noise({3, 5, 48}, 1e-4);
  const Gradients wide = run(linear, x, gradient);
  linear->float8 = true;
  const Gradients narrow = run(linear, x, gradient);
  const at::Tensor in = rounded(x.view({15, 32}), Float8::e4m3),
                   weight = rounded(linear->weight.detach(), Float8::e4m3),
                   grad = rounded(gradient.view({15, 48}), Float8::e5m2);
  EXPECT_LT(relative_error(narrow.out.view({15, 48}),
                           in.mm(weight.t()) + linear->bias.detach().to(at::kDouble)),
            1e-6);
  EXPECT_LT(relative_error(narrow.input.view({15, 32}), grad.mm(weight)), 1e-6);
  EXPECT_LT(relative_error(narrow.weight, grad.t().mm(in)), 1e-6);
  EXPECT_TRUE(at::allclose(narrow.bias, wide.bias));
  // Near the wide layer, and not it.
  for (const auto& [a, b] : {std::pair(narrow.out, wide.out),
                             {narrow.input, wide.input},
                             {narrow.weight, wide.weight}}) {
    const double error = relative_error(a, b.to(at::kDouble));
    EXPECT_LT(error, 0.12);
    EXPECT_GT(error, 1e-3);
  }
  const at::NoGradGuard no_grad;
  EXPECT_TRUE(at::equal(linear(x), wide.out)) << "without gradients it is the wide layer";
}

// What goes around a layer is added to its product, and gets the gradient of the sum unchanged.
TEST(Float8, AProductAddsWhatGoesAroundIt) {
  Linear linear = noisy_linear(16, 32);
  const at::Tensor gradient = noise({3, 4, 32});
  const auto results = [&](bool by_product) {
    const at::Tensor x = noise({3, 4, 16}).requires_grad_();
    const at::Tensor around = noise({3, 4, 32}).requires_grad_();
    linear->weight.mutable_grad().reset();
    const at::Tensor out = by_product ? float8_linear(x, linear->weight, {.added = around}, nullptr)
                                      : around + float8_linear(x, linear->weight, {}, nullptr);
    out.backward(gradient);
    return std::vector{out.detach(), x.grad(), around.grad(), linear->weight.grad().clone()};
  };
  const auto found = results(true), expected = results(false);
  for (size_t i = 0; i < found.size(); ++i)
    EXPECT_TRUE(at::allclose(found[i], expected[i], 1e-6, 1e-6)) << i;
  EXPECT_TRUE(at::equal(found[2], gradient));
}

TEST(Float8, FrozenWeightsAndOtherTypes) {
  Linear linear = noisy_linear(32, 16);
  linear->float8 = true;
  const Gradients all = run(linear, noise({4, 32}), noise({4, 16}));
  linear->weight.set_requires_grad(false);
  const Gradients some = run(linear, noise({4, 32}), noise({4, 16}));
  EXPECT_TRUE(at::equal(all.out, some.out));
  EXPECT_TRUE(at::equal(all.input, some.input));
  EXPECT_FALSE(some.weight.defined());
  linear->weight.set_requires_grad(true);
  linear->to(at::kBFloat16);
  const Gradients half =
      run(linear, noise({4, 32}).to(at::kBFloat16), noise({4, 16}).to(at::kBFloat16));
  EXPECT_EQ(half.out.scalar_type(), at::kBFloat16);
  EXPECT_EQ(half.weight.scalar_type(), at::kBFloat16);
  EXPECT_LT(relative_error(half.out, all.out.to(at::kDouble)), 0.05);
}

// Writes that no version tells of.
TEST(Float8, AWeightIsCastInEachCallUnlessItsCodesAreKept) {
  Linear linear = noisy_linear(16, 16);
  linear->float8 = true;
  const at::Tensor x = noise({4, 16}).set_requires_grad(true);
  const at::Tensor bias = linear->bias.detach(), before = linear(x).detach() - bias;
  linear->weight.data().mul_(2);
  EXPECT_TRUE(at::allclose(linear(x) - bias, before * 2));
  torch::optim::SGD optimizer({linear->weight}, 1);
  linear->weight.mutable_grad() = linear->weight.detach() * -1;
  optimizer.step();
  EXPECT_TRUE(at::allclose(linear(x) - bias, before * 4));
  linear->float8_cached = true;
  EXPECT_TRUE(at::allclose(linear(x) - bias, before * 4));
}

TEST(Float8, WeightsThatChangeAreCastAgain) {
  Linear linear = noisy_linear(16, 16);
  linear->float8 = linear->float8_cached = true;
  const at::Tensor x = noise({4, 16}).set_requires_grad(true);
  const at::Tensor bias = linear->bias.detach();
  const at::Tensor before = linear(x).detach() - bias;
  Linear clone(std::dynamic_pointer_cast<LinearImpl>(linear->clone()));
  {
    const at::NoGradGuard no_grad;
    linear->weight.mul_(2);
  }
  EXPECT_TRUE(at::allclose(linear(x) - bias, before * 2));
  linear->weight.set_data(linear->weight.detach() * 2);
  EXPECT_TRUE(at::allclose(linear(x) - bias, before * 4));
  EXPECT_TRUE(at::allclose(clone(x) - bias, before));
  // A weight that is changed between forward and backward is an error, as in other types.
  const at::Tensor out = linear(x).sum();
  {
    const at::NoGradGuard no_grad;
    linear->weight.mul_(2);
  }
  EXPECT_ANY_THROW(out.backward());
}

struct SharedRun {
  at::Tensor out, input, weight;  // this rank's, and the gradients of its input and weight
};

// Each rank's part of a layer, and of the sequence where that is shared. The largest values of
// weights, inputs and gradients are in the last part: scales of other parts would be larger.
struct SharedLinear {
  static constexpr int64_t kTokens = 32, kIn = 64, kOut = 96;

  at::Tensor part(const at::Tensor& whole, int64_t dim, int rank) const {
    return whole.chunk(2, dim)[static_cast<size_t>(rank)].contiguous();
  }
  SharedRun run(const comm::Group& group) const {
    const int rank = group.rank();
    const bool row = style == layout::TensorStyle::row;
    Linear linear(kIn, kOut, {.bias = false});
    linear->float8 = true;
    linear->weight.set_data(part(weight, row ? 1 : 0, rank));
    linear->sharing = Sharing{group, style, sequence};
    at::Tensor x = row ? part(input, 1, rank) : sequence ? part(input, 0, rank) : input.clone();
    x.set_requires_grad(true);
    const at::Tensor out = linear(x);
    out.backward(row ? (sequence ? part(gradient, 0, rank) : gradient) : part(gradient, 1, rank));
    return {out.detach(), x.grad(), linear->weight.grad()};
  }

  layout::TensorStyle style;
  bool sequence;
  at::Tensor input, weight, gradient;
};

TEST(Float8, TensorParallelRanksHaveTheScalesOfTheWhole) {
  const auto growing = [](int64_t rows, int64_t columns) {
    return noise({rows, columns}) * at::linspace(0.1, 5, columns) *
           at::linspace(0.1, 5, rows).unsqueeze(1);
  };
  const at::Tensor x = growing(SharedLinear::kTokens, SharedLinear::kIn),
                   weight = growing(SharedLinear::kOut, SharedLinear::kIn),
                   gradient = growing(SharedLinear::kTokens, SharedLinear::kOut);
  Linear whole(SharedLinear::kIn, SharedLinear::kOut, {.bias = false});
  whole->float8 = true;
  whole->weight.set_data(weight);
  const at::Tensor in = x.clone().set_requires_grad(true);
  const at::Tensor out = whole(in);
  out.backward(gradient);
  for (const auto style : {layout::TensorStyle::column, layout::TensorStyle::row}) {
    for (const bool sequence : {false, true}) {
      SCOPED_TRACE(sequence);
      const SharedLinear shared{style, sequence, x, weight, gradient};
      std::vector<SharedRun> ranks(2);
      comm::run_threads(2, [&](const comm::Group& group) {
        ranks[static_cast<size_t>(group.rank())] = shared.run(group);
      });
      const bool row = style == layout::TensorStyle::row;
      for (int rank = 0; rank < 2; ++rank) {
        const SharedRun& found = ranks[static_cast<size_t>(rank)];
        const auto expect = [&](const at::Tensor& part, const at::Tensor& all, int64_t dim) {
          const at::Tensor wanted = dim < 0 ? all : shared.part(all, dim, rank);
          EXPECT_LT(relative_error(part, wanted.to(at::kDouble)), 1e-6) << rank << " " << dim;
        };
        const int64_t of_sequence = sequence ? 0 : -1;
        expect(found.out, out.detach(), row ? of_sequence : 1);
        expect(found.input, in.grad(), row ? 1 : of_sequence);
        expect(found.weight, whole->weight.grad(), row ? 1 : 0);
      }
    }
  }
}

// What a kernel says of a tensor is believed of that tensor only, as it was, and once.
TEST(Float8, NotesAreOfOneTensor) {
  at::Tensor tensor = noise({4, 8});
  const at::Tensor amax = at::ones({1});
  note_amax(tensor, amax);
  EXPECT_TRUE(take_amax(tensor.detach().view({8, 4})).is_same(amax));
  EXPECT_FALSE(take_amax(tensor).defined());
  note_amax(tensor, amax);
  EXPECT_FALSE(take_amax(noise({4, 8})).defined());
  note_amax(tensor, amax);
  EXPECT_FALSE(take_amax(tensor.narrow(0, 0, 2)).defined());
  note_amax(tensor, amax);
  tensor.mul_(2);
  EXPECT_FALSE(take_amax(tensor).defined());
  const at::Tensor memory = at::empty({32});
  note_amax(at::from_blob(memory.data_ptr(), {32}), amax);
  EXPECT_FALSE(take_amax(at::from_blob(memory.data_ptr(), {32})).defined()) << "another's memory";
}

TEST(Float8, BadValuesStayBad) {
  Linear linear = noisy_linear(16, 16);
  linear->float8 = true;
  for (const float bad : {kNaN, kInfinity}) {
    at::Tensor x = noise({4, 16});
    x[1][2] = bad;
    EXPECT_FALSE(linear(x).isfinite().all().item<bool>());
    at::Tensor gradient = noise({4, 16});
    gradient[3][5] = bad;
    const Gradients result = run(linear, noise({4, 16}), gradient);
    EXPECT_FALSE(result.input.isfinite().all().item<bool>());
    EXPECT_FALSE(result.weight.isfinite().all().item<bool>());
  }
}

}  // namespace
}  // namespace lockstep::nn::float8_test
