// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/document_attention.h"

#include <ATen/ATen.h>
#include <torch/version.h>

#include <algorithm>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/nn/context/ring_attention.h"
#include "lockstep/nn/kernels/fused_cuda.h"

namespace lockstep::nn {
namespace {

at::Tensor int32s(const std::vector<int32_t>& values, c10::Device device) {
  return at::tensor(values, at::kInt).to(device);
}

// `borders` are those of all documents.
KeyRun keys_of(const QueryRun& run, const std::vector<int32_t>& borders, c10::Device device) {
  const int64_t end = run.position + run.count;
  const auto first = std::upper_bound(borders.begin(), borders.end(), run.position) - 1;
  KeyRun keys{.begin = *first, .count = end - *first};
  std::vector<int32_t> of_queries{0}, of_keys{0};
  for (auto each = first; *each < end; ++each) {
    const int64_t last = std::min<int64_t>(each[1], end);
    of_queries.push_back(static_cast<int32_t>(last - run.position));
    of_keys.push_back(static_cast<int32_t>(last - keys.begin));
    keys.longest_keys = std::max(keys.longest_keys, last - *each);
    keys.longest_query =
        std::max(keys.longest_query, last - std::max<int64_t>(*each, run.position));
  }
  keys.query_borders = int32s(of_queries, device);
  keys.key_borders = int32s(of_keys, device);
  return keys;
}

// Leaves this rank's tokens.
void share(Documents& found, int64_t length, const std::vector<int32_t>& borders, bool ring) {
  const std::vector<int64_t> places =
      context_places(length, found.group.size(), found.group.rank());
  const int64_t local = static_cast<int64_t>(places.size()), chunk = local / 2;
  const c10::Device device = found.positions.device();
  found.positions = found.positions.view({found.rows, length})
                        .index_select(1, at::tensor(places, at::kLong).to(device))
                        .view({-1});
  if (ring) {
    found.ring = std::make_shared<Ring>(
        plan_ring(found.starts, found.rows, found.window, found.group, device));
    return;
  }
  for (int64_t row = 0; row < found.rows; ++row) {
    for (const int64_t half : {0, 1}) {
      found.runs.push_back({row * local + half * chunk,
                            row * length + places[static_cast<size_t>(half * chunk)], chunk});
      if (device.is_cuda()) found.keys.push_back(keys_of(found.runs.back(), borders, device));
    }
  }
}

}  // namespace

Documents documents_of(const at::Tensor& positions, c10::Device device, int64_t window,
                       const ContextRanks& ranks) {
  if (positions.dim() != 2 || positions.scalar_type() != at::kLong || !positions.is_cpu()) {
    throw ConfigError(format(
        "[documents_of] positions are ({}) of {} on {}, must be (B, T) of "
        "Long on the CPU",
        join(positions.sizes()), c10::toString(positions.scalar_type()), positions.device().str()));
  }
  const at::Tensor flat = positions.contiguous().view({-1});
  const int64_t count = flat.numel(), length = positions.size(1);
  Documents found{.rows = positions.size(0),
                  .window = window,
                  .positions = flat.to(device),
                  .starts = at::empty({count}, at::kLong)};
  const auto* const position = flat.data_ptr<int64_t>();
  auto* const start = found.starts.data_ptr<int64_t>();
  std::vector<int32_t> borders;
  for (int64_t i = 0; i < count; ++i) {
    const bool begins = position[i] == 0 || i % length == 0;
    if (begins) borders.push_back(static_cast<int32_t>(i));
    if (position[i] < 0 || (!begins && position[i] != position[i - 1] + 1)) {
      throw ConfigError(
          format("[documents_of] position {} follows {} at token {} of row {}, must "
                 "be 0 or one more",
                 position[i], i == 0 ? -1 : position[i - 1], i % length, i / length));
    }
    start[i] = borders.back();
  }
  borders.push_back(static_cast<int32_t>(count));
  for (size_t i = 1; i < borders.size(); ++i)
    found.longest = std::max<int64_t>(found.longest, borders[i] - borders[i - 1]);
  found.borders = int32s(borders, device);
  if (ranks.group.size() > 1) {
    found.group = ranks.group;
    share(found, length, borders, ranks.ring);
  }
  return found;
}

#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 5)
namespace {

// (1, n, N, D) -> (N, n, D)
at::Tensor by_token(const at::Tensor& heads) { return heads.transpose(1, 2).squeeze(0); }

struct Span {
  at::Tensor query_borders, key_borders;
  int64_t longest_query = 0, longest_keys = 0;
};

at::Tensor flash(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Span& span,
                 int64_t window) {
  const auto before = window > 0 ? std::optional<int64_t>(window - 1) : std::nullopt;
  const auto after = window > 0 ? std::optional<int64_t>(0) : std::nullopt;
  return std::get<0>(at::_flash_attention_forward(
      q, k, v, span.query_borders, span.key_borders, span.longest_query, span.longest_keys,
      /*dropout_p=*/0.0, /*is_causal=*/true, /*return_debug_mask=*/false, /*scale=*/std::nullopt,
      before, after));
}

// Where queries are the end of a document's keys, they are aligned with the end.
at::Tensor flash(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                 const Documents& documents, int64_t window) {
  const at::Tensor queries = by_token(q), keys = by_token(k), values = by_token(v);
  at::Tensor mixed;
  if (documents.runs.empty()) {
    mixed =
        flash(queries, keys, values,
              {documents.borders, documents.borders, documents.longest, documents.longest}, window);
  } else {
    std::vector<at::Tensor> parts;
    for (size_t i = 0; i < documents.runs.size(); ++i) {
      const QueryRun& run = documents.runs[i];
      const KeyRun& seen = documents.keys[i];
      parts.push_back(flash(
          queries.narrow(0, run.begin, run.count), keys.narrow(0, seen.begin, seen.count),
          values.narrow(0, seen.begin, seen.count),
          {seen.query_borders, seen.key_borders, seen.longest_query, seen.longest_keys}, window));
    }
    mixed = at::cat(parts);
  }
  return mixed.unsqueeze(0).transpose(1, 2);
}

at::Tensor masked(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const Documents& documents, int64_t window) {
  const int64_t rows = documents.rows, length = k.size(2) / rows;
  const auto by_row = [&](const at::Tensor& heads) {
    return heads.reshape({heads.size(1), rows, -1, heads.size(3)}).transpose(0, 1);
  };
  const auto options = at::TensorOptions().dtype(at::kLong).device(q.device());
  const at::Tensor key = at::arange(length, options);
  const at::Tensor row_begins = at::arange(0, rows * length, length, options).unsqueeze(1);
  at::Tensor first = documents.starts.to(q.device()).view({rows, length}) - row_begins;
  if (window > 0) first = at::maximum(first, key - (window - 1));
  at::Tensor query = key;
  if (documents.group.size() > 1) {
    query = at::tensor(context_places(length, documents.group.size(), documents.group.rank()),
                       at::kLong)
                .to(q.device());
    first = first.index_select(1, query);
  }
  const at::Tensor seen =  // of a query of a row, the keys
      key.ge(first.unsqueeze(2)).logical_and_(key.le(query.unsqueeze(1)));
  return at::scaled_dot_product_attention(by_row(q), by_row(k), by_row(v), seen.unsqueeze(1), 0.0,
                                          /*is_causal=*/false, std::nullopt,
                                          /*enable_gqa=*/q.size(1) != k.size(1))
      .transpose(0, 1)
      .reshape({1, q.size(1), q.size(2), q.size(3)});
}

}  // namespace
#endif

at::Tensor document_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              const Documents& documents) {
  if (q.dim() != 4 || q.size(0) != 1 || q.size(2) != documents.positions.numel()) {
    throw ConfigError(format("[document_attention] q is ({}), must be (1, H, {}, D)",
                             join(q.sizes()), documents.positions.numel()));
  }
  if (documents.ring) return ring_attention(q, k, v, documents.ring);
  const int64_t window = documents.window;
  const auto whole = [&](const at::Tensor& heads) {
    return documents.group.size() > 1 ? gather_context(heads, documents.rows, documents.group)
                                      : heads;
  };
  const at::Tensor keys = whole(k), values = whole(v);
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 5)
  if (q.is_cuda())
    return cuda::has_flash_attention(q) ? flash(q, keys, values, documents, window)
                                        : masked(q, keys, values, documents, window);
#endif
  return blockwise_causal_attention(q, keys, values, kAttentionBlock, window,
                                    {documents.starts, documents.runs});
}

}  // namespace lockstep::nn
