// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/context/ring_attention.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/nn/attention.h"
#include "lockstep/nn/context/context.h"
#include "lockstep/nn/context/tile_attention.h"
#include "lockstep/nn/document_attention.h"
#include "tests/support/sampling.h"

namespace lockstep::nn {
namespace {

// Documents of these lengths in rows of `length`.
at::Tensor rows_of_documents(const std::vector<int64_t>& lengths, int64_t length) {
  std::vector<at::Tensor> parts;
  for (const int64_t each : lengths) parts.push_back(at::arange(each, at::kLong));
  return at::cat(parts).view({-1, length});
}

struct HeadTensors {
  at::Tensor q, k, v, grad;  // (1, heads, B * T, D)

  HeadTensors select(const at::Tensor& tokens) const {
    const auto some = [&](const at::Tensor& x) { return x.index_select(2, tokens); };
    return {some(q), some(k), some(v), some(grad)};
  }
};

struct Attended {
  at::Tensor out, q, k, v;
};

Attended attended(const HeadTensors& in, const Documents& documents) {
  const auto leaf = [](const at::Tensor& x) { return x.detach().clone().set_requires_grad(true); };
  const at::Tensor q = leaf(in.q), k = leaf(in.k), v = leaf(in.v);
  const at::Tensor out = document_attention(q, k, v, documents);
  out.backward(in.grad);
  return {out.detach(), q.grad(), k.grad(), v.grad()};
}

// The tokens that a rank has of rows of `length` that lie one after the other.
at::Tensor tokens_of(int64_t rows, int64_t length, int ranks, int rank) {
  const at::Tensor places = at::tensor(context_places(length, ranks, rank), at::kLong);
  return at::cat([&] {
    std::vector<at::Tensor> all;
    for (int64_t row = 0; row < rows; ++row) all.push_back(places + row * length);
    return all;
  }());
}

// What the ranks have together.
Attended of_ranks(int ranks, const HeadTensors& in, const at::Tensor& positions, int64_t window,
                  bool ring) {
  const auto empty = [](const at::Tensor& x) { return at::zeros_like(x); };
  Attended all{empty(in.q), empty(in.q), empty(in.k), empty(in.v)};
  std::vector<Attended> parts(static_cast<size_t>(ranks));
  comm::run_threads(ranks, [&](const comm::Group& group) {
    const at::Tensor mine = tokens_of(positions.size(0), positions.size(1), ranks, group.rank());
    const Documents documents = documents_of(positions, at::kCPU, window, {group, ring});
    parts[static_cast<size_t>(group.rank())] = attended(in.select(mine), documents);
  });
  for (int rank = 0; rank < ranks; ++rank) {
    const at::Tensor mine = tokens_of(positions.size(0), positions.size(1), ranks, rank);
    const Attended& part = parts[static_cast<size_t>(rank)];
    all.out.index_copy_(2, mine, part.out);
    all.q.index_copy_(2, mine, part.q);
    all.k.index_copy_(2, mine, part.k);
    all.v.index_copy_(2, mine, part.v);
  }
  return all;
}

void expect_alike(const Attended& a, const Attended& b, double tolerance) {
  const auto close = [&](const at::Tensor& x, const at::Tensor& y) {
    return at::allclose(x, y, tolerance, tolerance);
  };
  EXPECT_TRUE(close(a.out, b.out));
  EXPECT_TRUE(close(a.q, b.q)) << (a.q - b.q).abs().max();
  EXPECT_TRUE(close(a.k, b.k)) << (a.k - b.k).abs().max();
  EXPECT_TRUE(close(a.v, b.v)) << (a.v - b.v).abs().max();
}

HeadTensors random_heads(int64_t heads, int64_t kv_heads, int64_t tokens, at::ScalarType type) {
  const auto some = [&](int64_t n) { return at::randn({1, n, tokens, 8}, type); };
  return {some(heads), some(kv_heads), some(kv_heads), some(heads)};
}

at::Tensor formula(int64_t heads, int64_t by_token, int64_t by_element, int64_t by_head,
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

void expect_values(const at::Tensor& found, const std::vector<double>& values) {
  const at::Tensor expected = at::tensor(values, at::kDouble);
  EXPECT_TRUE(at::allclose(found.flatten(), expected, 0, 1e-7)) << found << expected;
}

// Numbers that were computed in float64 by another program.
TEST(RingAttention, HasKnownValues) {
  const HeadTensors in{formula(2, 3, 5, 7, 11, 5, 4), formula(1, 2, 3, 1, 7, 3, 2),
                       formula(1, 5, 1, 2, 9, 4, 2), formula(2, 1, 2, 3, 5, 2, 2)};
  const auto norm = [](const at::Tensor& x) { return x.norm().item<double>(); };
  for (const int ranks : {1, 2}) {
    SCOPED_TRACE(ranks);
    const Attended one = of_ranks(ranks, in, rows_of_documents({8}, 8), 0, true);
    EXPECT_NEAR((one.out * in.grad).sum().item<double>(), 2.1762130588580404, 1e-12);
    EXPECT_NEAR(norm(one.out), 4.5735872940, 1e-9);
    EXPECT_NEAR(norm(one.q), 1.4344487346, 1e-9);
    EXPECT_NEAR(norm(one.k), 1.1691560814, 1e-9);
    EXPECT_NEAR(norm(one.v), 1.9600933973, 1e-9);
    expect_values(one.out[0][1][7], {-.4713888, -.2652578});
    expect_values(one.q[0][0][7], {.3549675, .3440282});
    expect_values(one.k[0][0][0], {-.6364190, .3595168});
    expect_values(one.v[0][0][7], {-.0653042, .0236185});
    const Attended two = of_ranks(ranks, in, rows_of_documents({3, 5}, 8), 0, true);
    EXPECT_NEAR((two.out * in.grad).sum().item<double>(), 1.8557992827481664, 1e-12);
    EXPECT_NEAR(norm(two.q), 1.1315650497, 1e-9);
    EXPECT_NEAR(norm(two.k), 1.1974961658, 1e-9);
    EXPECT_NEAR(norm(two.v), 2.4736459419, 1e-9);
    expect_values(two.k[0][0][3], {.3316489, .0170624});
    expect_values(two.v[0][0][4], {1.1246040, -1.0618894});
  }
}

// The log-sum-exp of each step of two ranks, and of all steps together.
TEST(RingAttention, StepsHaveKnownSums) {
  const at::Tensor q = formula(2, 3, 5, 7, 11, 5, 4), k = formula(1, 2, 3, 1, 7, 3, 2),
                   v = formula(1, 5, 1, 2, 9, 4, 2);
  const at::Tensor starts = at::zeros({8}, at::kLong);
  std::vector<std::vector<at::Tensor>> sums(2, std::vector<at::Tensor>(3));
  comm::run_threads(2, [&](const comm::Group& group) {
    const int rank = group.rank();
    const Ring ring = plan_ring(starts, 1, 0, group, at::kCPU);
    const auto of = [&](const at::Tensor& x, int which) {
      return x.index_select(2, tokens_of(1, 8, 2, which));
    };
    const at::Tensor mine = of(q, rank), out = at::zeros({1, 2, 4, 2}, at::kDouble);
    const at::Tensor all = at::full({1, 2, 4}, -INFINITY, at::kDouble);
    for (int step = 0; step < 2; ++step) {
      const at::Tensor lse = at::full({1, 2, 4}, -INFINITY, at::kDouble);
      for (const AttentionTile& tile : ring.steps[static_cast<size_t>(step)]) {
        const int other = (rank - step + 2) % 2;
        const PartialAttention part = attend(mine, of(k, other), of(v, other), tile);
        merge(out.clone(), lse, part, tile);
        merge(out, all, part, tile);
      }
      sums[static_cast<size_t>(rank)][static_cast<size_t>(step)] = lse;
    }
    sums[static_cast<size_t>(rank)][2] = all;
  });
  expect_values(sums[0][0], {1.3258252, 1.3157668, 1.3583740, 1.3757588, -.5303301, -.2178849,
                             1.4208850, 1.5687531});
  expect_values(sums[0][1].narrow(2, 2, 2), {1.9030540, 1.9860463, 1.5895750, 1.9381060});
  expect_values(sums[1][0], {1.4142136, 1.7693516, 1.1220391, 1.6943934, -.7954951, -.0961026,
                             1.8290411, 1.4652560});
  expect_values(sums[1][1], {.1356685, -.1751920, 1.5233941, 1.2582291, 1.4041551, 1.2297226,
                             -.1023479, 1.6716643});
  expect_values(sums[0][2], {1.3258252, 1.3157668, 2.3604961, 2.4199010, -.5303301, -.2178849,
                             2.2019300, 2.4635334});
}

// Rows and documents of all kinds: cut inside chunks, longer than a rank's tokens, one token long;
// windows; heads that share keys, fewer of them than ranks; chunks of one token.
TEST(RingAttention, IsThatOfOneProcessAndOfGatheredKeys) {
  struct Case {
    int64_t length;
    std::vector<int64_t> documents;
  };
  const std::vector<Case> cases{{0, {}},  // 2 n: one token in each chunk
                                {24, {24, 24}},
                                {48, {5, 30, 13, 48}},
                                {96, {1, 1, 94, 40, 50, 6}},
                                {720, {300, 7, 413}}};
  at::manual_seed(5);
  for (const int ranks : {2, 3, 4, 6}) {
    for (const Case& each : cases) {
      const int64_t length = each.length == 0 ? 2 * ranks : each.length;
      const at::Tensor positions = rows_of_documents(
          each.length == 0 ? std::vector<int64_t>{length} : each.documents, length);
      for (const int64_t window : {0, 1, 5, 11, 40}) {
        if (length > 100 && window > 0 && window < 40) continue;
        for (const int64_t kv_heads : {1, 4}) {
          if (!test::tests_all() && (ranks + window + kv_heads + length / 24) % 7 != 0) continue;
          SCOPED_TRACE(testing::Message() << ranks << " ranks, rows of " << length << ", window "
                                          << window << ", " << kv_heads << " heads of keys");
          for (const auto type : {at::kDouble, at::kFloat}) {
            const HeadTensors in = random_heads(4, kv_heads, positions.numel(), type);
            const Attended whole = attended(in, documents_of(positions, at::kCPU, window));
            const double tolerance = type == at::kDouble ? 1e-12 : 2e-5;
            expect_alike(of_ranks(ranks, in, positions, window, true), whole, tolerance);
            expect_alike(of_ranks(ranks, in, positions, window, false), whole, tolerance);
          }
        }
      }
    }
  }
}

// Sums of gradients that no order of computation changes.
TEST(RingAttention, GradientsOfEachDocumentAddUp) {
  at::manual_seed(7);
  const HeadTensors in = random_heads(4, 2, 48, at::kDouble);
  const Attended all = of_ranks(3, in, rows_of_documents({20, 7, 21}, 48), 0, true);
  int64_t begin = 0;
  for (const int64_t length : {20, 7, 21}) {
    const auto sum = [&](const at::Tensor& x) { return x.narrow(2, begin, length).sum(2)[0]; };
    EXPECT_LT(sum(all.k).abs().max().item<double>(), 1e-12);
    EXPECT_TRUE(at::allclose(sum(all.v), sum(in.grad).view({2, 2, 8}).sum(1)));
    begin += length;
  }
}

// In zig-zag all ranks have as many pairs of a query and a key, but for the tokens of the diagonal.
TEST(RingAttention, RanksHaveEqualWork) {
  const at::Tensor starts = at::zeros({96}, at::kLong);
  std::vector<int64_t> work(4);
  comm::run_threads(4, [&](const comm::Group& group) {
    for (const auto& tiles : plan_ring(starts, 1, 0, group, at::kCPU).steps)
      for (const AttentionTile& tile : tiles)
        for (int64_t query = 0; query < tile.queries.size(); ++query)
          work[static_cast<size_t>(group.rank())] += tile.seen(query).size();
  });
  for (const int64_t each : work) EXPECT_EQ(each, 96 * 97 / 2 / 4);
}

// Documents that a rank's chunks do not share cost nothing.
TEST(RingAttention, LeavesOutWhatNoDocumentShares) {
  const Documents documents = documents_of(rows_of_documents({12, 12, 12, 12}, 48), at::kCPU);
  comm::run_threads(2, [&](const comm::Group& group) {
    const Ring ring = plan_ring(documents.starts, 1, 0, group, at::kCPU);
    check(ring.steps[0].size() == 2 && ring.steps[1].empty(), "only the diagonals");
  });
}

}  // namespace
}  // namespace lockstep::nn
