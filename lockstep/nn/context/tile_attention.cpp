// SPDX-License-Identifier: Apache-2.0
// Some queries at a time against all keys of the tile that they see: their scores are the only
// thing that grows with both.
#include "lockstep/nn/context/tile_attention.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "lockstep/nn/context/tile_attention_flash.h"
#include "lockstep/nn/kernels/activation_kernels.h"
#include "lockstep/nn/kernels/score_products.h"

namespace lockstep::nn {
namespace {

at::Tensor accumulated(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? x : x.to(at::kFloat);
}

// The heads of q that share a head of k lie one below the other, so that one product serves them.
class TileBlocks {
 public:
  TileBlocks(const at::Tensor& q, const at::Tensor& k, const AttentionTile& tile)
      : tile_(tile),
        kv_heads_(k.size(1)),
        sharing_(q.size(1) / k.size(1)),
        width_(q.size(3)),
        block_(q.is_cpu() ? 128 : 1024) {}

  double scale() const { return 1 / std::sqrt(static_cast<double>(width_)); }

  // (1, H, M, ...) -> (K, H / K, queries, ...)
  at::Tensor of_queries(const at::Tensor& x) const {
    const at::Tensor part =
        accumulated(x.narrow(2, tile_.queries.begin, tile_.queries.size())).squeeze(0);
    auto sizes = part.sizes().vec();
    sizes[0] = sharing_;
    sizes.insert(sizes.begin(), kv_heads_);
    return part.reshape(sizes);
  }
  at::Tensor of_keys(const at::Tensor& x) const {
    return accumulated(x.narrow(2, tile_.keys.begin, tile_.keys.size())).squeeze(0);
  }
  // (K, H / K, queries, ...) -> (K, H / K * count, ...)
  static at::Tensor rows(const at::Tensor& queries, const layout::Range& part) {
    return queries.narrow(2, part.begin, part.size()).flatten(1, 2);
  }
  at::Tensor unflattened(const at::Tensor& rows, int64_t count) const {
    return rows.view({kv_heads_, sharing_, count, -1});
  }

  // Calls body(queries, all keys that they see).
  template <class Body>
  void for_each(Body body) const {
    const int64_t count = tile_.queries.size();
    for (int64_t begin = 0; begin < count; begin += block_) {
      const int64_t end = std::min(begin + block_, count);
      body(layout::Range{begin, end},
           layout::Range{tile_.seen(begin).begin, tile_.seen(end - 1).end});
    }
  }

  // Calls body(head, query in the block, values that it sees, count of them) for rows of scores;
  // what it does not see becomes 0.
  template <class Body>
  void for_seen(const at::Tensor& scores, const layout::Range& queries, const layout::Range& keys,
                Body body) const {
    for_score_rows(scores, [&](int64_t row, float* values) {
      const int64_t query = row % queries.size();
      const layout::Range seen = tile_.seen(queries.begin + query);
      float* const visible = std::fill_n(values, seen.begin - keys.begin, 0.0F);
      std::fill(visible + seen.size(), values + keys.size(), 0.0F);
      body(row / queries.size(), query, visible, seen.size());
    });
  }

  // True where a query does not see a key; undefined where each sees all.
  at::Tensor hidden(const layout::Range& queries, const layout::Range& keys,
                    c10::Device device) const {
    if (!tile_.causal && tile_.window == 0) return {};
    std::vector<int64_t> first, end;
    for (int64_t query = queries.begin; query < queries.end; ++query) {
      const layout::Range seen = tile_.seen(query);
      first.push_back(seen.begin);
      end.push_back(seen.end);
    }
    const at::Tensor key = at::arange(keys.begin, keys.end, at::kLong);
    const auto column = [](const std::vector<int64_t>& values) {
      return at::tensor(values, at::kLong).unsqueeze(1);
    };
    return key.lt(column(first)).logical_or_(key.ge(column(end))).to(device);
  }
  at::Tensor masked(const at::Tensor& scores, const layout::Range& queries,
                    const layout::Range& keys) const {
    const at::Tensor mask = hidden(queries, keys, scores.device());
    if (mask.defined()) {
      unflattened(scores, queries.size())
          .masked_fill_(mask, -std::numeric_limits<double>::infinity());
    }
    return scores;
  }

 private:
  const AttentionTile& tile_;
  int64_t kv_heads_, sharing_, width_, block_;
};

bool has_kernels(const at::Tensor& scores) {
  return scores.is_cpu() && scores.scalar_type() == at::kFloat;
}

}  // namespace

PartialAttention attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        const AttentionTile& tile) {
  if (flash_tiles::can_attend(q)) return flash_tiles::attend(q, k, v, tile);
  const TileBlocks blocks(q, k, tile);
  const at::Tensor queries = blocks.of_queries(q), keys = blocks.of_keys(k),
                   values = blocks.of_keys(v);
  const at::Tensor out = at::empty(queries.sizes(), queries.options()),
                   lse = at::empty(queries.sizes().slice(0, 3), queries.options());
  blocks.for_each([&](const layout::Range& part, const layout::Range& seen) {
    const at::Tensor scores = batch_product(
        TileBlocks::rows(queries, part), keys.narrow(1, seen.begin, seen.size()).transpose(1, 2));
    at::Tensor p = scores;
    if (has_kernels(scores)) {
      const int64_t count = lse.size(2);
      float* const of_rows = lse.data_ptr<float>() + part.begin;
      const auto scale = static_cast<float>(blocks.scale());
      blocks.for_seen(scores, part, seen,
                      [&](int64_t head, int64_t query, float* visible, int64_t number) {
                        of_rows[head * count + query] =
                            activation_kernels().softmax(visible, number, number, scale);
                      });
    } else {
      blocks.masked(scores.mul_(blocks.scale()), part, seen);
      const at::Tensor sums = scores.logsumexp(-1, /*keepdim=*/true);
      lse.narrow(2, part.begin, part.size())
          .copy_(blocks.unflattened(sums, part.size()).squeeze(-1));
      p = scores.sub_(sums).exp_();
    }
    const at::Tensor mixed = batch_product(p, values.narrow(1, seen.begin, seen.size()));
    out.narrow(2, part.begin, part.size()).copy_(blocks.unflattened(mixed, part.size()));
  });
  return {out.flatten(0, 1).unsqueeze(0), lse.flatten(0, 1).unsqueeze(0)};
}

void merge(const at::Tensor& out, const at::Tensor& lse, const PartialAttention& part,
           const AttentionTile& tile) {
  const at::Tensor merged = lse.narrow(2, tile.queries.begin, tile.queries.size());
  const at::Tensor sum = at::logaddexp(merged, part.lse);
  out.narrow(2, tile.queries.begin, tile.queries.size())
      .lerp_(part.out, (part.lse - sum).exp_().unsqueeze(-1));
  merged.copy_(sum);
}

void add_gradients(const AttentionGradients& sums, const at::Tensor& q, const at::Tensor& k,
                   const at::Tensor& v, const AttentionResult& result, const AttentionTile& tile) {
  if (flash_tiles::can_attend(q)) return flash_tiles::add_gradients(sums, q, k, v, result, tile);
  const TileBlocks blocks(q, k, tile);
  const at::Tensor queries = blocks.of_queries(q), keys = blocks.of_keys(k),
                   values = blocks.of_keys(v), grad = blocks.of_queries(result.grad),
                   lse = blocks.of_queries(result.lse).contiguous(),
                   delta = blocks.of_queries(result.delta).contiguous();
  const at::Tensor grad_q = blocks.of_queries(sums.q), grad_k = blocks.of_keys(sums.k),
                   grad_v = blocks.of_keys(sums.v);  // views
  const auto scale = static_cast<float>(blocks.scale());
  blocks.for_each([&](const layout::Range& part, const layout::Range& seen) {
    const at::Tensor some = keys.narrow(1, seen.begin, seen.size()),
                     rows = TileBlocks::rows(queries, part),
                     grad_rows = TileBlocks::rows(grad, part);
    const at::Tensor p = batch_product(rows, some.transpose(1, 2));
    const int64_t count = lse.size(2);
    if (has_kernels(p)) {
      const float* const of_rows = lse.data_ptr<float>() + part.begin;
      blocks.for_seen(p, part, seen,
                      [&](int64_t head, int64_t query, float* visible, int64_t number) {
                        activation_kernels().scaled_exponentials(visible, number, scale,
                                                                 of_rows[head * count + query]);
                      });
    } else {
      blocks.masked(p.mul_(blocks.scale()), part, seen);
      p.sub_(TileBlocks::rows(lse, part).unsqueeze(-1)).exp_();
    }
    add_batch_product(grad_v.narrow(1, seen.begin, seen.size()), p.transpose(1, 2), grad_rows);
    const at::Tensor grad_scores =
        batch_product(grad_rows, values.narrow(1, seen.begin, seen.size()).transpose(1, 2));
    if (has_kernels(p)) {
      const float* const probabilities = p.data_ptr<float>();
      const float* const of_rows = delta.data_ptr<float>() + part.begin;
      for_score_rows(grad_scores, [&](int64_t row, float* values_of_row) {
        activation_kernels().softmax_backward_with_mean(
            probabilities + row * seen.size(), values_of_row, seen.size(), scale,
            of_rows[row / part.size() * count + row % part.size()]);
      });
    } else {
      grad_scores.sub_(TileBlocks::rows(delta, part).unsqueeze(-1)).mul_(p).mul_(blocks.scale());
    }
    add_batch_product(grad_k.narrow(1, seen.begin, seen.size()), grad_scores.transpose(1, 2), rows);
    grad_q.narrow(2, part.begin, part.size())
        .add_(blocks.unflattened(batch_product(grad_scores, some), part.size()));
  });
}

}  // namespace lockstep::nn
