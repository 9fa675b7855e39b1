// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/document_attention.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/nn/attention.h"

namespace lockstep::nn {
namespace {

// Documents of these lengths in rows of `length`.
at::Tensor positions_of(const std::vector<int64_t>& lengths, int64_t length) {
  std::vector<at::Tensor> parts;
  for (const int64_t each : lengths) parts.push_back(at::arange(each, at::kLong));
  return at::cat(parts).view({-1, length});
}

struct Outcome {
  at::Tensor out, q, k, v;
};

template <class Attend>
Outcome outcome_of(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                   const at::Tensor& grad, Attend attend) {
  const auto leaf = [](const at::Tensor& x) { return x.detach().clone().set_requires_grad(true); };
  const at::Tensor a = leaf(q), b = leaf(k), c = leaf(v);
  const at::Tensor out = attend(a, b, c);
  out.backward(grad);
  return {out.detach(), a.grad(), b.grad(), c.grad()};
}

void expect_same_outcome(const Outcome& a, const Outcome& b, double tolerance) {
  const auto close = [&](const at::Tensor& x, const at::Tensor& y) {
    return at::allclose(x, y, tolerance, tolerance);
  };
  EXPECT_TRUE(close(a.out, b.out));
  EXPECT_TRUE(close(a.q, b.q));
  EXPECT_TRUE(close(a.k, b.k));
  EXPECT_TRUE(close(a.v, b.v));
}

at::Tensor made_tensor(int64_t heads, int64_t by_token, int64_t by_element, int64_t by_head,
                       int64_t modulus, int64_t minus, double divisor) {
  const at::Tensor x = at::empty({1, heads, 8, 2}, at::kDouble);
  auto value = x.accessor<double, 4>();
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t t = 0; t < 8; ++t) {
      for (int64_t i = 0; i < 2; ++i) {
        const int64_t number = (by_token * t + by_element * i + by_head * h) % modulus - minus;
        value[0][h][t][i] = static_cast<double>(number) / divisor;
      }
    }
  }
  return x;
}

// Numbers that were computed in float64 by another program.
TEST(DocumentAttention, HasKnownValues) {
  const at::Tensor q = made_tensor(2, 3, 5, 7, 11, 5, 4), k = made_tensor(1, 2, 3, 1, 7, 3, 2),
                   v = made_tensor(1, 5, 1, 2, 9, 4, 2), grad = made_tensor(2, 1, 2, 3, 5, 2, 2);
  const auto at_token = [](const at::Tensor& x, int64_t t) {
    return std::vector<double>{x[0][0][t][0].item<double>(), x[0][0][t][1].item<double>()};
  };
  const auto near = [](double a, double b) {
    return testing::ElementsAre(testing::DoubleNear(a, 1e-7), testing::DoubleNear(b, 1e-7));
  };
  const auto expect_norms = [&](const Outcome& run, double out, double dq, double dk, double dv) {
    EXPECT_NEAR(run.out.norm().item<double>(), out, 1e-9);
    EXPECT_NEAR(run.q.norm().item<double>(), dq, 1e-9);
    EXPECT_NEAR(run.k.norm().item<double>(), dk, 1e-9);
    EXPECT_NEAR(run.v.norm().item<double>(), dv, 1e-9);
  };
  const auto run_with = [&](const std::vector<int64_t>& lengths) {
    const Documents documents = documents_of(positions_of(lengths, 8), at::kCPU);
    return outcome_of(q, k, v, grad, [&](const auto& a, const auto& b, const auto& c) {
      return document_attention(a, b, c, documents);
    });
  };
  const Outcome one = run_with({8});
  EXPECT_NEAR((one.out * grad).sum().item<double>(), 2.1762130588580404, 1e-12);
  expect_norms(one, 4.5735872940, 1.4344487346, 1.1691560814, 1.9600933973);
  EXPECT_THAT(at_token(one.out, 7), near(.0594636, .4531804));
  const Outcome two = run_with({3, 5});
  EXPECT_NEAR((two.out * grad).sum().item<double>(), 1.8557992827481664, 1e-12);
  expect_norms(two, 5.5069064667, 1.1315650497, 1.1974961658, 2.4736459419);
  EXPECT_THAT(at_token(two.out, 7), near(.4722397, .8301726));
  EXPECT_THAT(at_token(two.k, 3), near(.3316489, .0170624));
  EXPECT_THAT(at_token(two.v, 4), near(1.1246040, -1.0618894));
}

TEST(DocumentAttention, IsThatOfEachDocumentAlone) {
  const std::vector<int64_t> lengths{1, 17, 3, 11, 32, 5, 5, 1, 1, 20};  // rows of 32
  at::manual_seed(1);
  for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
    for (const int64_t window : {0, 4, 40}) {
      for (const int64_t block : {1, 7, 16, 128}) {
        SCOPED_TRACE(testing::Message() << type << ", window " << window << ", block " << block);
        const at::Tensor q = at::randn({1, 4, 96, 8}, type), k = at::randn({1, 2, 96, 8}, type),
                         v = at::randn({1, 2, 96, 8}, type), grad = at::randn({1, 4, 96, 8}, type);
        const Documents documents = documents_of(positions_of(lengths, 32), at::kCPU);
        EXPECT_EQ(documents.longest, 32);
        const auto packed =
            outcome_of(q, k, v, grad, [&](const auto& a, const auto& b, const auto& c) {
              return blockwise_causal_attention(a, b, c, block, window,
                                                {.starts = documents.starts});
            });
        const auto alone =
            outcome_of(q, k, v, grad, [&](const auto& a, const auto& b, const auto& c) {
              std::vector<at::Tensor> parts;
              int64_t begin = 0;
              for (const int64_t length : lengths) {
                parts.push_back(blockwise_causal_attention(
                    a.narrow(2, begin, length), b.narrow(2, begin, length),
                    c.narrow(2, begin, length), 128, window));
                begin += length;
              }
              return at::cat(parts, 2);
            });
        expect_same_outcome(packed, alone, type == at::kDouble ? 1e-12 : 1e-5);
      }
    }
  }
}

// Queries of two ranks that share a row, zig-zag, against all keys.
TEST(DocumentAttention, TakesSomeOfTheQueries) {
  at::manual_seed(3);
  const at::Tensor q = at::randn({1, 4, 48, 8}, at::kDouble),
                   k = at::randn({1, 2, 48, 8}, at::kDouble),
                   v = at::randn({1, 2, 48, 8}, at::kDouble),
                   grad = at::randn({1, 4, 48, 8}, at::kDouble);
  const Documents documents = documents_of(positions_of({5, 30, 13}, 48), at::kCPU);
  const auto whole = outcome_of(q, k, v, grad, [&](const auto& a, const auto& b, const auto& c) {
    return document_attention(a, b, c, documents);
  });
  for (const int64_t block : {1, 5, 128}) {
    const auto shared = outcome_of(q, k, v, grad, [&](const auto& a, const auto& b, const auto& c) {
      const auto of = [&](int64_t first, int64_t second) {
        const at::Tensor mine = at::cat({a.narrow(2, first, 12), a.narrow(2, second, 12)}, 2);
        return blockwise_causal_attention(
            mine, b, c, block, 0,
            {.starts = documents.starts, .runs = {{0, first, 12}, {12, second, 12}}});
      };
      const at::Tensor outer = of(0, 36), inner = of(12, 24);
      return at::cat({outer.narrow(2, 0, 12), inner, outer.narrow(2, 12, 12)}, 2);
    });
    expect_same_outcome(shared, whole, 1e-12);
  }
  EXPECT_THROW(blockwise_causal_attention(q, k, v, 8, 0, {.runs = {{0, 1, 48}}}), ConfigError);
}

TEST(DocumentAttention, ADocumentChangesNoOther) {
  at::manual_seed(2);
  const at::Tensor q = at::randn({1, 2, 64, 8}), k = at::randn({1, 2, 64, 8}),
                   v = at::randn({1, 2, 64, 8}), grad = at::randn({1, 2, 64, 8});
  const Documents documents = documents_of(positions_of({20, 30, 14}, 64), at::kCPU);
  const auto attend = [&](const auto& a, const auto& b, const auto& c) {
    return document_attention(a, b, c, documents);
  };
  const Outcome before = outcome_of(q, k, v, grad, attend);
  for (const at::Tensor& x : {q, k, v}) x.select(2, 33).fill_(5);
  const Outcome after = outcome_of(q, k, v, grad, attend);
  EXPECT_FALSE(before.out.equal(after.out));
  for (const auto& [begin, length] : {std::pair(0, 20), std::pair(50, 14)}) {
    const auto same = [begin = begin, length = length](const at::Tensor& a, const at::Tensor& b) {
      return a.narrow(2, begin, length).equal(b.narrow(2, begin, length));
    };
    EXPECT_TRUE(same(before.out, after.out) && same(before.q, after.q) && same(before.k, after.k) &&
                same(before.v, after.v));
  }
}

TEST(DocumentAttention, RefusesPositionsThatAreNone) {
  const auto of = [](std::vector<int64_t> positions) {
    return documents_of(at::tensor(positions, at::kLong).view({1, -1}), at::kCPU);
  };
  EXPECT_EQ(of({0, 1, 0, 0}).borders.size(0), 4);
  EXPECT_THROW(of({0, 2}), ConfigError);
  EXPECT_THROW(of({0, -1}), ConfigError);
  EXPECT_THROW(documents_of(at::zeros({1, 3}), at::kCPU), ConfigError);
  const at::Tensor q = at::zeros({1, 1, 3, 8});
  EXPECT_THROW(document_attention(q, q, q, of({0, 1})), ConfigError);
}

}  // namespace
}  // namespace lockstep::nn
