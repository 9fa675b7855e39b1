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
  constexpr int64_t kGrain = 1 << 17;  // products for each start of a thread
  const int64_t heads = std::max<int64_t>(kGrain / (2 * sharing * length * width), 1);
  memory::parallel_for(seen.keys.size(0), heads, [&](int64_t begin, int64_t end) {
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

int64_t KvCacheOptions::slots() const {
  return window > 0 ? std::min(capacity, window + std::max<int64_t>(longest, 256)) : capacity;
}

KvPlaces::KvPlaces(KvCacheOptions options)
    : options_(options),
      first_(static_cast<size_t>(options.rows)),
      end_(static_cast<size_t>(options.rows)) {}

std::vector<PlacedSpan> KvPlaces::place(std::span<const TextSpan> spans) {
  std::vector<PlacedSpan> placed;
  for (const TextSpan& span : spans) {
    const auto row = static_cast<size_t>(span.row);
    if (span.begin == 0) first_[row] = end_[row] = 0;
    check(end_[row] == span.begin, "spans of a text follow one another");
    check(span.end() <= options_.capacity && span.count <= options_.longest,
          "a text fits its cache");
    PlacedSpan place{span};
    if (span.end() - first_[row] > options_.slots()) {
      // Of what is there the new tokens see the last window - 1 at most.
      const int64_t first = span.begin - std::min(options_.window - 1, span.begin);
      place.dropped = first - first_[row];
      first_[row] = first;
    }
    place.first = first_[row];
    end_[row] = span.end();
    placed.push_back(place);
  }
  return placed;
}

void KvCache::allocate(int64_t heads, int64_t width, const at::TensorOptions& options) {
  if (memory_.keys.defined()) return;
  memory_.keys = at::empty({options_.rows, heads, options_.slots(), width}, options);
  memory_.values = at::empty_like(memory_.keys);
}

void KvCache::drop(std::span<const PlacedSpan> spans) {
  for (const PlacedSpan& span : spans) {
    if (span.dropped == 0) continue;
    for (const at::Tensor& memory : {memory_.keys[span.row], memory_.values[span.row]}) {
      memory.narrow(1, 0, span.slot()).copy_(memory.narrow(1, span.dropped, span.slot()).clone());
    }
  }
}

void KvCache::store(const at::Tensor& k, const at::Tensor& v, std::span<const PlacedSpan> spans) {
  allocate(k.size(1), k.size(3), k.options());
  drop(spans);
  int64_t at = 0;
  for (const PlacedSpan& span : spans) {
    const auto put = [&](const at::Tensor& memory, const at::Tensor& tokens) {
      memory[span.row]
          .narrow(1, span.slot(), span.count)
          .copy_(tokens[0].narrow(1, at, span.count));
    };
    put(memory_.keys, k);
    put(memory_.values, v);
    at += span.count;
  }
}

at::Tensor KvCache::attend_new(const at::Tensor& qkv, const cuda::AttentionHeads& heads,
                               const cuda::NewTokens& tokens) {
  const at::NoGradGuard no_grad;
  allocate(heads.kv_heads, qkv.size(2) / (heads.heads + 2 * heads.kv_heads), qkv.options());
  return cuda::attend_new(qkv, heads, tokens, memory_, options_.window);
}

at::Tensor KvCache::attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           std::span<const PlacedSpan> spans) {
  const at::NoGradGuard no_grad;
  const int64_t window = options_.window;
  store(k, v, spans);
  at::Tensor out = at::empty({1, q.size(2), q.size(1), q.size(3)}, q.options());  // (1, N, H, D)
  int64_t at = 0;
  for (const PlacedSpan& span : spans) {
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
    const int64_t first = window > 0 ? std::max(span.begin - window + 1, span.first) : span.first;
    const auto seen_of = [&](const at::Tensor& memory) {
      return memory[span.row].narrow(1, first - span.first, span.end() - first);
    };
    const Seen seen{seen_of(memory_.keys), seen_of(memory_.values), first};
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
