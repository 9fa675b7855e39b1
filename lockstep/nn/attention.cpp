// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/attention.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/version.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/layout/box.h"
#include "lockstep/nn/autograd/capsule.h"
#include "lockstep/nn/autograd/one_derivative.h"
#include "lockstep/nn/autograd/product.h"
#include "lockstep/nn/kernels/activation_kernels.h"
#include "lockstep/nn/kernels/score_products.h"

namespace lockstep::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

void check_shapes(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  bool has_runs = false) {
  const bool fits = q.dim() == 4 && k.dim() == 4 && k.sizes() == v.sizes() &&
                    q.size(0) == k.size(0) && (has_runs || q.size(2) == k.size(2)) &&
                    q.size(3) == k.size(3) && k.size(1) > 0 && q.size(1) % k.size(1) == 0;
  if (fits) return;
  throw ConfigError(
      format("[causal_attention] q is ({}), k ({}), v ({}), must be (B, H, T, D), "
             "(B, K, T, D) twice, with K dividing H",
             join(q.sizes()), join(k.sizes()), join(v.sizes())));
}

// The heads of q that share a head of k lie one below the other, so that one product serves them.
struct Blocks {
  int64_t batch, sharing, length, width;  // B * K, H / K, T, D
  int64_t block, window;                  // window: at most T
  const QueryPlaces& places;

  Blocks(const at::Tensor& q, const at::Tensor& k, int64_t block, int64_t window,
         const QueryPlaces& places)
      : batch(k.size(0) * k.size(1)),
        sharing(q.size(1) / k.size(1)),
        length(k.size(2)),
        width(q.size(3)),
        block(block),
        window(window > 0 ? std::min(window, length) : length),
        places(places) {}

  // The first key that a position sees; it never falls from one to the next.
  int64_t first(int64_t position) const {
    const int64_t start = places.starts.defined() ? places.starts.data_ptr<int64_t>()[position] : 0;
    return std::max(position - window + 1, start);
  }

  at::Tensor of_queries(const at::Tensor& q) const {
    return q.reshape({batch, sharing, -1, width});
  }
  at::Tensor of_keys(const at::Tensor& k) const { return k.reshape({batch, length, width}); }
  at::Tensor rows(const at::Tensor& queries, int64_t begin, int64_t count) const {
    return queries.narrow(2, begin, count).reshape({batch, sharing * count, width});
  }
  // The keys and values that positions [begin, begin + count) see, all together.
  layout::Range seen(int64_t begin, int64_t count) const { return {first(begin), begin + count}; }
  static at::Tensor narrowed(const at::Tensor& keys, layout::Range range) {
    return keys.narrow(1, range.begin, range.size());
  }
  // (B * K, H / K * count, keys seen): probabilities of positions [begin, begin + count).
  at::Tensor probabilities(const at::Tensor& rows, const at::Tensor& keys, int64_t begin,
                           int64_t count) const {
    const layout::Range range = seen(begin, count);
    const at::Tensor scores = batch_product(rows, narrowed(keys, range).transpose(1, 2));
    if (scores.is_cpu() && scores.scalar_type() == at::kFloat) {
      for_score_rows(scores, [&](int64_t row, float* values) {
        const int64_t position = begin + row % count;
        const int64_t seen_from = first(position);
        float* const visible = std::fill_n(values, seen_from - range.begin, 0.0F);
        activation_kernels().softmax(visible, position + 1 - seen_from, range.end - seen_from,
                                     static_cast<float>(scale()));
      });
      return scores;
    }
    const at::Tensor hidden =
        at::full({count, count}, -std::numeric_limits<double>::infinity(), scores.options());
    scores.mul_(scale());
    const at::Tensor by_position = scores.view({batch, sharing, count, range.size()});
    by_position.narrow(3, range.size() - count, count).add_(hidden.triu(1));
    if (places.starts.defined()) {
      std::vector<int64_t> firsts(static_cast<size_t>(count));
      for (int64_t i = 0; i < count; ++i) firsts[static_cast<size_t>(i)] = first(begin + i);
      const at::Tensor keys_seen = at::arange(range.begin, range.end, at::kLong);
      const at::Tensor before = keys_seen.lt(at::tensor(firsts, at::kLong).unsqueeze(1));
      by_position.masked_fill_(before.to(scores.device()),
                               -std::numeric_limits<double>::infinity());
    } else if (range.end > window) {  // some of these positions do not see the range's first keys
      by_position.narrow(3, 0, count).add_(hidden.tril(begin - window - range.begin));
    }
    return at::softmax(scores, -1);
  }
  // May be in the memory of grad_p.
  at::Tensor grad_scores(const at::Tensor& p, const at::Tensor& grad_p) const {
    if (p.is_cpu() && p.scalar_type() == at::kFloat) {
      const int64_t end = p.size(2);
      const float* probabilities = p.data_ptr<float>();
      for_score_rows(grad_p, [&](int64_t row, float* values) {
        activation_kernels().softmax_backward(probabilities + row * end, values, end,
                                              static_cast<float>(scale()));
      });
      return grad_p;
    }
    return at::_softmax_backward_data(grad_p, p, -1, p.scalar_type()).mul_(scale());
  }
  double scale() const { return 1 / std::sqrt(static_cast<double>(width)); }

  // Calls body(first query, its position, queries).
  template <class Body>
  void for_each(Body body) const {
    const std::vector<QueryRun> all{{0, 0, length}};
    for (const QueryRun& run : places.runs.empty() ? all : places.runs) {
      for (int64_t done = 0; done < run.count; done += block)
        body(run.begin + done, run.position + done, std::min(block, run.count - done));
    }
  }
};

struct BlockwiseAttention : torch::autograd::Function<BlockwiseAttention> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, int64_t block, int64_t window,
                            const QueryPlaces& places) {
    const Blocks blocks(q, k, block, window, places);
    const at::Tensor queries = blocks.of_queries(q), keys = blocks.of_keys(k),
                     values = blocks.of_keys(v);
    const at::Tensor out = kept_product([&] {
      at::Tensor mixed = at::empty_like(queries, at::MemoryFormat::Contiguous);
      blocks.for_each([&](int64_t begin, int64_t position, int64_t count) {
        const at::Tensor p =
            blocks.probabilities(blocks.rows(queries, begin, count), keys, position, count);
        const at::Tensor part =
            batch_product(p, Blocks::narrowed(values, blocks.seen(position, count)));
        mixed.narrow(2, begin, count)
            .copy_(part.view({blocks.batch, blocks.sharing, count, blocks.width}));
      });
      return mixed;
    });
    context->save_for_backward({q, k, v});
    context->saved_data["block"] = block;
    context->saved_data["window"] = window;
    save_value(*context, "places", places);
    return out.view(q.sizes());
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    require_one_derivative("causal_attention");
    const auto saved = context->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2];
    const auto places = saved_value<QueryPlaces>(*context, "places");
    const Blocks blocks(q, k, context->saved_data["block"].toInt(),
                        context->saved_data["window"].toInt(), places);
    const at::Tensor queries = blocks.of_queries(q), keys = blocks.of_keys(k),
                     values = blocks.of_keys(v), grad = blocks.of_queries(gradients[0]);
    at::Tensor grad_q = at::empty_like(queries, at::MemoryFormat::Contiguous),
               grad_k = at::zeros_like(keys, at::MemoryFormat::Contiguous),
               grad_v = at::zeros_like(values, at::MemoryFormat::Contiguous);
    blocks.for_each([&](int64_t begin, int64_t position, int64_t count) {
      const layout::Range range = blocks.seen(position, count);
      const at::Tensor rows = blocks.rows(queries, begin, count),
                       grad_rows = blocks.rows(grad, begin, count);
      const at::Tensor p = blocks.probabilities(rows, keys, position, count);
      add_batch_product(Blocks::narrowed(grad_v, range), p.transpose(1, 2), grad_rows);
      const at::Tensor grad_p =
          batch_product(grad_rows, Blocks::narrowed(values, range).transpose(1, 2));
      const at::Tensor grad_scores = blocks.grad_scores(p, grad_p);
      add_batch_product(Blocks::narrowed(grad_k, range), grad_scores.transpose(1, 2), rows);
      grad_q.narrow(2, begin, count)
          .copy_(batch_product(grad_scores, Blocks::narrowed(keys, range))
                     .view({blocks.batch, blocks.sharing, count, blocks.width}));
    });
    return {grad_q.view(q.sizes()), grad_k.view(k.sizes()), grad_v.view(v.sizes()),
            at::Tensor(),           at::Tensor(),           at::Tensor()};
  }
};

// The runs must be all of q, in order, and lie among the positions of k.
void check_places(const at::Tensor& q, const at::Tensor& k, const QueryPlaces& places) {
  const at::Tensor& starts = places.starts;
  if (starts.defined() &&
      (!starts.is_cpu() || starts.scalar_type() != at::kLong || starts.dim() != 1 ||
       starts.size(0) != k.size(2) || !starts.is_contiguous())) {
    throw ConfigError(
        format("[causal_attention] starts are ({}) of {} on {}, must be ({}) of Long "
               "on the CPU",
               join(starts.sizes()), c10::toString(starts.scalar_type()), starts.device().str(),
               k.size(2)));
  }
  int64_t next = 0;
  for (const QueryRun& run : places.runs) {
    if (run.begin != next || run.position < 0 || run.position + run.count > k.size(2)) next = -1;
    if (next < 0) break;
    next += run.count;
  }
  if (!places.runs.empty() && next != q.size(2)) {
    throw ConfigError(
        format("[causal_attention] the runs are not all of {} queries, in order, at "
               "positions of {} keys",
               q.size(2), k.size(2)));
  }
}

}  // namespace

at::Tensor blockwise_causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                      int64_t block, int64_t window, const QueryPlaces& places) {
  check_shapes(q, k, v, !places.runs.empty());
  check_places(q, k, places);
  if (block < 1 || window < 0) {
    throw ConfigError(format(
        "[causal_attention] block is {} and window {}, must be at least 1 and 0", block, window));
  }
  return BlockwiseAttention::apply(q, k, v, block, window, places);
}

at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            int64_t window) {
#if TORCH_VERSION_MAJOR >= 2
  check_shapes(q, k, v);
  if (window != 0 && window < q.size(2))
    return blockwise_causal_attention(q, k, v, kAttentionBlock, window);
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 5
  return at::scaled_dot_product_attention(q, k, v, {}, 0.0, /*is_causal=*/true, std::nullopt,
                                          /*enable_gqa=*/q.size(1) != k.size(1));
#else
  const auto shared = [&](const at::Tensor& heads) {
    return q.size(1) == k.size(1) ? heads : heads.repeat_interleave(q.size(1) / k.size(1), 1);
  };
  return at::scaled_dot_product_attention(q, shared(k), shared(v), {}, 0.0, /*is_causal=*/true);
#endif
#else
  return blockwise_causal_attention(q, k, v, kAttentionBlock, window);
#endif
}

}  // namespace lockstep::nn
