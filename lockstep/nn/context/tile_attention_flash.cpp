// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/context/tile_attention_flash.h"

#include <ATen/ATen.h>
#include <torch/version.h>

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

}  // namespace

bool can_attend(const at::Tensor& q) { return cuda::has_flash_attention(q); }

PartialAttention attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        const AttentionTile& tile) {
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
  const auto add = [](const at::Tensor& sum, const layout::Range& places, const at::Tensor& part) {
    sum.narrow(2, places.begin, places.size()).add_(by_head(part));
  };
  add(sums.q, tile.queries, std::get<0>(gradients));
  add(sums.k, tile.keys, std::get<1>(gradients));
  add(sums.v, tile.keys, std::get<2>(gradients));
}

#else

bool can_attend(const at::Tensor&) { return false; }

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
