// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/context/tile_attention_flash.h"

#include <ATen/ATen.h>
#include <torch/version.h>

#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 5)
#include <ATen/SDPBackend.h>

#include <tuple>
#endif

#include "lockstep/core/error.h"
#include "lockstep/nn/kernels/fused_cuda.h"

namespace lockstep::nn::flash_tiles {

#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 5)
namespace {

using MaybeTensor = std::optional<at::Tensor>;
using MaybeInt = std::optional<int64_t>;

// (1, n, M, D) -> (1, count, n, D), or (count, n, D) where documents lie one after the other.
at::Tensor by_token(const at::Tensor& heads, const layout::Range& places, bool has_borders) {
  const at::Tensor part = heads.narrow(2, places.begin, places.size()).transpose(1, 2);
  return has_borders ? part.squeeze(0) : part;
}

at::Tensor by_head(const at::Tensor& part) {
  return (part.dim() == 3 ? part.unsqueeze(0) : part).transpose(1, 2);
}

// How a tile is told to libtorch. Queries are aligned with the last keys.
struct Arguments {
  MaybeTensor borders;
  int64_t longest_query, longest_keys;
  MaybeInt before, after;

  explicit Arguments(const AttentionTile& tile)
      : longest_query(tile.queries.size()), longest_keys(tile.keys.size()) {
    if (tile.borders.defined()) {
      borders = tile.borders;
      longest_query = longest_keys = tile.longest;
    }
    if (tile.window == 0) return;
    // The last query and the last key are this far from each other.
    const int64_t apart =
        tile.query_position + tile.queries.size() - tile.key_position - tile.keys.size();
    before = tile.window - 1 - apart;
    if (tile.causal) after = 0;
  }
};

// cuDNN's plans are kept by the strides of queries, keys and values alone, and would be wrong for
// results with others: so all is contiguous.
at::Tensor part_of(const at::Tensor& heads, const layout::Range& places) {
  return heads.narrow(2, places.begin, places.size()).contiguous();
}

void add(const at::Tensor& sum, const layout::Range& places, const at::Tensor& part) {
  sum.narrow(2, places.begin, places.size()).add_(part);
}

PartialAttention attend_with_cudnn(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   const AttentionTile& tile) {
  const auto results = at::_scaled_dot_product_cudnn_attention(
      part_of(q, tile.queries), part_of(k, tile.keys), part_of(v, tile.keys),
      /*attn_bias=*/std::nullopt, /*compute_log_sumexp=*/true, /*dropout_p=*/0.0, tile.causal);
  const auto& [out, lse] = std::tie(std::get<0>(results), std::get<1>(results));
  return {out.to(at::kFloat), lse.view({1, q.size(1), tile.queries.size()})};
}

void add_cudnn_gradients(const AttentionGradients& sums, const at::Tensor& q, const at::Tensor& k,
                         const at::Tensor& v, const AttentionResult& result,
                         const AttentionTile& tile) {
  const at::Tensor no_random = at::empty({0}, q.options().dtype(at::kLong));  // nothing is dropped
  const auto gradients = at::_scaled_dot_product_cudnn_attention_backward(
      part_of(result.grad, tile.queries), part_of(q, tile.queries), part_of(k, tile.keys),
      part_of(v, tile.keys), part_of(result.out, tile.queries),
      part_of(result.lse, tile.queries).unsqueeze(-1), no_random, no_random,
      /*attn_bias=*/at::Tensor(), /*cum_seq_q=*/at::Tensor(), /*cum_seq_k=*/at::Tensor(),
      tile.queries.size(), tile.keys.size(), /*dropout_p=*/0.0, tile.causal);
  add(sums.q, tile.queries, std::get<0>(gradients));
  add(sums.k, tile.keys, std::get<1>(gradients));
  add(sums.v, tile.keys, std::get<2>(gradients));
}

}  // namespace

bool can_attend(const at::Tensor& q) { return cuda::has_flash_attention(q); }

bool takes_cudnn(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                 const AttentionTile& tile) {
  if (!tile.whole || tile.window > 0) return false;
  const auto choice = at::_fused_sdp_choice(
      q.narrow(2, tile.queries.begin, tile.queries.size()),
      k.narrow(2, tile.keys.begin, tile.keys.size()),
      v.narrow(2, tile.keys.begin, tile.keys.size()), /*attn_mask=*/std::nullopt,
      /*dropout_p=*/0.0, tile.causal, /*scale=*/std::nullopt, /*enable_gqa=*/true);
  return choice == static_cast<int64_t>(at::SDPBackend::cudnn_attention);
}

PartialAttention attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        const AttentionTile& tile) {
  if (takes_cudnn(q, k, v, tile)) return attend_with_cudnn(q, k, v, tile);
  const Arguments arguments(tile);
  const bool documents = arguments.borders.has_value();
  const auto results = at::_flash_attention_forward(
      by_token(q, tile.queries, documents), by_token(k, tile.keys, documents),
      by_token(v, tile.keys, documents), arguments.borders, arguments.borders,
      arguments.longest_query, arguments.longest_keys, /*dropout_p=*/0.0, tile.causal,
      /*return_debug_mask=*/false, /*scale=*/std::nullopt, arguments.before, arguments.after);
  const at::Tensor& lse = std::get<1>(results);
  return {by_head(std::get<0>(results)).to(at::kFloat), documents ? lse.unsqueeze(0) : lse};
}

void add_gradients(const AttentionGradients& sums, const at::Tensor& q, const at::Tensor& k,
                   const at::Tensor& v, const AttentionResult& result, const AttentionTile& tile) {
  if (takes_cudnn(q, k, v, tile)) return add_cudnn_gradients(sums, q, k, v, result, tile);
  const Arguments arguments(tile);
  const bool documents = arguments.borders.has_value();
  const at::Tensor lse = result.lse.narrow(2, tile.queries.begin, tile.queries.size());
  const at::Tensor borders = arguments.borders.value_or(at::Tensor());
  const at::Tensor no_random = at::empty({0}, q.options().dtype(at::kLong));  // nothing is dropped
  const auto gradients = at::_flash_attention_backward(
      by_token(result.grad, tile.queries, documents), by_token(q, tile.queries, documents),
      by_token(k, tile.keys, documents), by_token(v, tile.keys, documents),
      by_token(result.out, tile.queries, documents),
      (documents ? lse.squeeze(0) : lse).contiguous(), borders, borders, arguments.longest_query,
      arguments.longest_keys, /*dropout_p=*/0.0, tile.causal, no_random, no_random,
      /*scale=*/std::nullopt, arguments.before, arguments.after);
  add(sums.q, tile.queries, by_head(std::get<0>(gradients)));
  add(sums.k, tile.keys, by_head(std::get<1>(gradients)));
  add(sums.v, tile.keys, by_head(std::get<2>(gradients)));
}

#else

bool can_attend(const at::Tensor&) { return false; }
bool takes_cudnn(const at::Tensor&, const at::Tensor&, const at::Tensor&, const AttentionTile&) {
  return false;
}

PartialAttention attend(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                        const AttentionTile&) {
  check(false, "flash attention is not in this libtorch");
  return {};
}

void add_gradients(const AttentionGradients&, const at::Tensor&, const at::Tensor&,
                   const at::Tensor&, const AttentionResult&, const AttentionTile&) {
  check(false, "flash attention is not in this libtorch");
}

#endif

}  // namespace lockstep::nn::flash_tiles
