// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/attention.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "lockstep/core/error.h"

namespace lockstep::nn {
namespace {

struct Inputs {
  at::Tensor q, k, v;
};

Inputs make_inputs(int64_t heads, int64_t kv_heads, int64_t length, at::ScalarType type) {
  at::manual_seed(length);
  const auto make = [&](int64_t n) {
    return at::randn({2, n, length, 8}, type).set_requires_grad(true);
  };
  return {make(heads), make(kv_heads), make(kv_heads)};
}

// By the definition, with all scores in memory.
at::Tensor plain(const Inputs& in, int64_t window) {
  const int64_t sharing = in.q.size(1) / in.k.size(1), length = in.q.size(2);
  const at::Tensor k = in.k.repeat_interleave(sharing, 1), v = in.v.repeat_interleave(sharing, 1);
  const at::Tensor scores = at::matmul(in.q, k.transpose(2, 3)) / std::sqrt(8.0);
  const at::Tensor ones = at::ones({length, length}, at::kBool);
  const at::Tensor hidden = ones.triu(1).logical_or(ones.tril(-window));
  return at::matmul(
      scores.masked_fill(hidden, -std::numeric_limits<double>::infinity()).softmax(-1), v);
}
at::Tensor plain(const Inputs& in) { return plain(in, in.q.size(2)); }

struct Results {
  at::Tensor out, q, k, v;
};

template <class Function>
Results run(const Inputs& in, Function function) {
  for (const at::Tensor& tensor : {in.q, in.k, in.v}) tensor.mutable_grad() = at::Tensor();
  const at::Tensor out = function(in);
  // A gradient that differs from element to element.
  out.backward(at::sin(at::arange(out.numel(), out.scalar_type())).view(out.sizes()));
  return {out.detach(), in.q.grad(), in.k.grad(), in.v.grad()};
}

void expect_close(const Results& a, const Results& b, double tolerance) {
  EXPECT_TRUE(at::allclose(a.out, b.out, tolerance, tolerance));
  EXPECT_TRUE(at::allclose(a.q, b.q, tolerance, tolerance));
  EXPECT_TRUE(at::allclose(a.k, b.k, tolerance, tolerance));
  EXPECT_TRUE(at::allclose(a.v, b.v, tolerance, tolerance));
}

TEST(Attention, BlocksGiveTheDefinition) {
  for (const int64_t kv_heads : {1, 2, 4}) {
    for (const int64_t length : {1, 3, 8, 21}) {
      for (const int64_t block : {1, 4, 8, 64}) {
        SCOPED_TRACE(testing::Message()
                     << kv_heads << " of 4 heads, length " << length << ", block " << block);
        const Inputs in = make_inputs(4, kv_heads, length, at::kDouble);
        const Results expected = run(in, [](const Inputs& i) { return plain(i); });
        expect_close(
            run(in,
                [&](const Inputs& i) { return blockwise_causal_attention(i.q, i.k, i.v, block); }),
            expected, 1e-12);
      }
    }
  }
}

TEST(Attention, TheDefaultGivesTheDefinition) {
  for (const int64_t kv_heads : {1, 4}) {
    const Inputs in = make_inputs(4, kv_heads, 300, at::kFloat);
    expect_close(run(in, [](const Inputs& i) { return causal_attention(i.q, i.k, i.v); }),
                 run(in, [](const Inputs& i) { return plain(i); }), 1e-4);
  }
}

// Position t sees t - window + 1 to t: blocks end and begin inside of windows, and the other way.
TEST(Attention, WindowsHideWhatIsFurtherBack) {
  for (const int64_t window : {1, 2, 5, 8, 20, 21, 300}) {
    for (const at::ScalarType type : {at::kDouble, at::kFloat}) {
      const Inputs in = make_inputs(4, 2, 21, type);
      const Results expected = run(in, [&](const Inputs& i) { return plain(i, window); });
      const double tolerance = type == at::kDouble ? 1e-12 : 1e-5;
      for (const int64_t block : {1, 4, 8, 64}) {
        SCOPED_TRACE(testing::Message() << "window " << window << ", block " << block);
        expect_close(run(in,
                         [&](const Inputs& i) {
                           return blockwise_causal_attention(i.q, i.k, i.v, block, window);
                         }),
                     expected, tolerance);
      }
      expect_close(
          run(in, [&](const Inputs& i) { return causal_attention(i.q, i.k, i.v, window); }),
          expected, tolerance);
    }
  }
  const Inputs in = make_inputs(4, 2, 3, at::kFloat);
  EXPECT_THROW(causal_attention(in.q, in.k, in.v, -1), ConfigError);
}

TEST(Attention, TakesTransposedHeads) {
  const Inputs in = make_inputs(4, 2, 10, at::kDouble);
  const auto transposed = [](const at::Tensor& x) {
    return x.detach().transpose(1, 2).contiguous().transpose(1, 2).set_requires_grad(true);
  };
  const Inputs strided{transposed(in.q), transposed(in.k), transposed(in.v)};
  const auto attend = [](const Inputs& i) { return blockwise_causal_attention(i.q, i.k, i.v, 4); };
  expect_close(run(strided, attend), run(in, attend), 1e-14);
}

TEST(Attention, RefusesWhatDoesNotFit) {
  const at::Tensor q = at::zeros({1, 4, 3, 8}), k = at::zeros({1, 3, 3, 8});
  EXPECT_THROW(static_cast<void>(causal_attention(q, k, k)), ConfigError);
  EXPECT_THROW(static_cast<void>(causal_attention(q, q.narrow(2, 0, 2), q)), ConfigError);
  EXPECT_THROW(static_cast<void>(blockwise_causal_attention(q, q, q, 0)), ConfigError);
}

}  // namespace
}  // namespace lockstep::nn
