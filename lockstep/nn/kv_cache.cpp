// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/kv_cache.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/version.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "lockstep/core/error.h"
#include "lockstep/memory/threads/parallel_for.h"
#include "lockstep/nn/attention.h"
#include "lockstep/nn/kernels/decode_kernels.h"

namespace lockstep::nn {
namespace {

// The keys, or values, of one text: (K, slots, D), of which some are seen.
struct Seen {
  at::Tensor keys, values;  // (K, L, D)
  int64_t first;            // the position of the first
};

float scale_of(const at::Tensor& q) {
  return static_cast<float>(1 / std::sqrt(static_cast<double>(q.size(-1))));
}

// One query of each head, (H, D), by our own kernel.
template <class T>
void attend_one(const DecodeKernels<T>& kernels, const at::Tensor& q, const Seen& seen,
                const at::Tensor& out) {
  const int64_t sharing = q.size(0) / seen.keys.size(0), width = q.size(1),
                length = seen.keys.size(1);
  const auto at_head = [](const at::Tensor& tensor, int64_t head) {
    return static_cast<const T*>(tensor.data_ptr()) + head * tensor.stride(0);
  };
  memory::parallel_for(seen.keys.size(0), 1, [&](int64_t begin, int64_t end) {
    std::vector<float> scores(static_cast<size_t>(length));
    for (int64_t head = begin; head < end; ++head) {
      kernels.attend(q.data_ptr<float>() + head * sharing * width, at_head(seen.keys, head),
                     at_head(seen.values, head), out.data_ptr<float>() + head * sharing * width,
                     scores.data(), sharing, length, width, scale_of(q));
    }
  });
}

// Several queries of a text, (H, n, D), the first of which is at position `begin`.
at::Tensor attend_several(const at::Tensor& q, const Seen& seen, int64_t begin, int64_t window) {
  const int64_t heads = q.size(0), count = q.size(1), width = q.size(2),
                kv_heads = seen.keys.size(0), length = seen.keys.size(1);
  const auto places = at::TensorOptions().dtype(at::kLong).device(q.device());
  const at::Tensor key = at::arange(seen.first, seen.first + length, places).unsqueeze(0),
                   query = at::arange(begin, begin + count, places).unsqueeze(1);
  at::Tensor hidden = key.gt(query);
  if (window > 0) hidden = hidden.logical_or(key.le(query - window));
  const at::Tensor rows = q.reshape({kv_heads, heads / kv_heads * count, width});
  at::Tensor scores = at::bmm(rows, seen.keys.transpose(1, 2)).to(at::kFloat).mul_(scale_of(q));
  scores.view({heads, count, length})
      .masked_fill_(hidden.unsqueeze(0), -std::numeric_limits<float>::infinity());
  return at::bmm(at::softmax(scores, -1).to(q.scalar_type()), seen.values)
      .view({heads, count, width});
}

}  // namespace

void KvCache::store(const at::Tensor& k, const at::Tensor& v, std::span<const TextSpan> spans,
                    int64_t window) {
  if (!keys_.defined()) {
    const auto& [rows, capacity, longest] = options_;
    // Room for what a span sees, and to continue for a while before tokens are moved.
    const int64_t slots =
        window > 0 ? std::min(capacity, window + std::max<int64_t>(longest, 256)) : capacity;
    keys_ = at::empty({rows, k.size(1), slots, k.size(3)}, k.options());
    values_ = at::empty_like(keys_);
    first_.assign(static_cast<size_t>(rows), 0);
    end_.assign(static_cast<size_t>(rows), 0);
  }
  int64_t at = 0;
  for (const TextSpan& span : spans) {
    const auto row = static_cast<size_t>(span.row);
    if (span.begin == 0) first_[row] = end_[row] = 0;
    check(end_[row] == span.begin, "spans of a text follow one another");
    check(span.end() <= options_.capacity && span.count <= options_.longest,
          "a text fits its cache");
    if (span.end() - first_[row] > keys_.size(2)) {
      // Of what is there the new tokens see the last window - 1 at most.
      const int64_t kept = std::min(window - 1, span.begin), from = span.begin - kept;
      for (const at::Tensor& memory : {keys_[span.row], values_[span.row]}) {
        memory.narrow(1, 0, kept).copy_(memory.narrow(1, from - first_[row], kept).clone());
      }
      first_[row] = from;
    }
    const int64_t slot = span.begin - first_[row];
    keys_[span.row].narrow(1, slot, span.count).copy_(k[0].narrow(1, at, span.count));
    values_[span.row].narrow(1, slot, span.count).copy_(v[0].narrow(1, at, span.count));
    end_[row] = span.end();
    at += span.count;
  }
}

at::Tensor KvCache::attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           std::span<const TextSpan> spans, int64_t window) {
  const at::NoGradGuard no_grad;
  store(k, v, spans, window);
  at::Tensor out = at::empty({1, q.size(2), q.size(1), q.size(3)}, q.options());  // (1, N, H, D)
  int64_t at = 0;
  for (const TextSpan& span : spans) {
    const auto row = static_cast<size_t>(span.row);
    const at::Tensor queries = q[0].narrow(1, at, span.count);  // (H, n, D)
    at::Tensor result = out[0].narrow(0, at, span.count);       // (n, H, D)
    at += span.count;
    if (span.begin == 0) {
      const auto whole = [&](const at::Tensor& all) {
        return all.narrow(2, at - span.count, span.count);
      };
      result.copy_(causal_attention(whole(q), whole(k), whole(v), window)[0].transpose(0, 1));
      continue;
    }
    const int64_t seen_first =
        window > 0 ? std::max(span.begin - window + 1, first_[row]) : first_[row];
    const Seen seen{keys_[span.row].narrow(1, seen_first - first_[row], span.end() - seen_first),
                    values_[span.row].narrow(1, seen_first - first_[row], span.end() - seen_first),
                    seen_first};
    const at::ScalarType type = q.scalar_type();
    if (span.count == 1 && q.is_cpu() && (type == at::kFloat || type == at::kBFloat16)) {
      const at::Tensor one = queries.select(1, 0).to(at::kFloat).contiguous();
      const at::Tensor mixed = at::empty_like(one);
      if (type == at::kFloat) {
        attend_one(float_decode_kernels(), one, seen, mixed);
      } else {
        attend_one(bfloat16_decode_kernels(), one, seen, mixed);
      }
      result[0].copy_(mixed);
    } else {
      // Scores are not all in memory at once.
      for (int64_t i = 0; i < span.count; i += kAttentionBlock) {
        const int64_t count = std::min(kAttentionBlock, span.count - i);
        result.narrow(0, i, count)
            .copy_(attend_several(queries.narrow(1, i, count), seen, span.begin + i, window)
                       .transpose(0, 1));
      }
    }
  }
  return out.transpose(1, 2);
}

}  // namespace lockstep::nn
