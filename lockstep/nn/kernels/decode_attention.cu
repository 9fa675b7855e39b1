// SPDX-License-Identifier: Apache-2.0
// Attention of one new token of each text. A block has a row, a head of k and a part of the keys;
// the queries that share the head are computed together, so that each key and value is read once.
// Groups of threads each walk over keys of their own with a running maximum (online softmax), and
// what they have is merged at the end: in a warp, in the block, and over the blocks of a row by the
// last one that is done.
#include <algorithm>
#include <cstdint>

#include "lockstep/nn/kernels/decode_launch.h"
#include "lockstep/nn/kernels/dependent_launch.cuh"
#include "lockstep/nn/kernels/packs.cuh"

namespace lockstep::nn::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kElements = 8;            // of a key, of a thread
constexpr int kKeys = 4;                // on their way to a thread
constexpr int64_t kLeast = 128;         // keys of a block, if there are as many
constexpr int64_t kBlocksWanted = 264;  // that are busy at the same time
constexpr float kLog2e = 1.4426950408889634F;

// What is known of the keys seen so far: result = sum / weight.
struct Mix {
  float largest = -INFINITY, weight = 0;
  float sum[kElements] = {};

  __device__ void add(float score, const float (&value)[kElements]) {
    const float top = fmaxf(largest, score);
    if (top == -INFINITY) return;
    const float before = exp2f(largest - top), now = exp2f(score - top);
    weight = weight * before + now;
#pragma unroll
    for (int i = 0; i < kElements; ++i) sum[i] = sum[i] * before + now * value[i];
    largest = top;
  }
  __device__ void merge_with_lane(int offset) {
    const float other = __shfl_xor_sync(~0u, largest, offset), top = fmaxf(largest, other);
    const float mine = top == -INFINITY ? 0 : exp2f(largest - top),
                its = top == -INFINITY ? 0 : exp2f(other - top);
    weight = weight * mine + __shfl_xor_sync(~0u, weight, offset) * its;
#pragma unroll
    for (int i = 0; i < kElements; ++i)
      sum[i] = sum[i] * mine + __shfl_xor_sync(~0u, sum[i], offset) * its;
    largest = top;
  }
};

// The elements of a head that a thread has, of L threads that have them all.
template <int L>
__device__ float sum_of_group(float value) {
#pragma unroll
  for (int offset = L / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
  return value;
}

template <class T, int L>
__device__ void norm_and_rotate(const DecodeAttention& p, const void* norm, int64_t position,
                                float (&values)[kElements]) {
  const int part = threadIdx.x % L;
  if (norm != nullptr) {
    float squares = 0, weights[kElements];
#pragma unroll
    for (int i = 0; i < kElements; ++i) squares += values[i] * values[i];
    const float scale =
        rsqrtf(sum_of_group<L>(squares) / static_cast<float>(L * kElements) + p.epsilon);
    read(static_cast<const T*>(norm) + part * kElements, weights);
#pragma unroll
    for (int i = 0; i < kElements; ++i) values[i] = load(store<T>(values[i] * scale * weights[i]));
  }
  if (p.table == nullptr) return;
  // The partner of an element is half a head away, with another thread.
  constexpr int kHalf = L * kElements / 2;
  const int at = part * kElements % kHalf;
  const float* cosines = p.table + position * kHalf + at;
  const float* sines = cosines + p.table_positions * kHalf;
  const float sign = part < L / 2 ? -1 : 1;
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const float partner = __shfl_xor_sync(~0u, values[i], L / 2);
    values[i] = load(store<T>(values[i] * cosines[i] + sign * partner * sines[i]));
  }
}

// Scores of several blocks of a row: largest and weight of each query, then its sums.
__device__ float* part_of(const DecodeAttention& p, int64_t row, int64_t head, int64_t split) {
  return p.scratch + ((row * p.heads + head) * gridDim.x + split) * (p.width + 2);
}

template <class T, int L, int G>
__global__ void __launch_bounds__(kThreads) decode_attention_kernel(DecodeAttention p) {
  constexpr int kWidth = L * kElements, kGroups = 32 / L;  // of a warp
  __shared__ float largest_of[kWarps][G], weight_of[kWarps][G], sums_of[kWarps][G][kWidth];
  __shared__ bool is_last;
  let_the_next_kernel_begin();
  wait_for_earlier_kernels();
  const int64_t sharing = p.heads / p.kv_heads, turns = (sharing + G - 1) / G;
  const int64_t row = blockIdx.z, kv_head = blockIdx.y / turns,
                first = kv_head * sharing + blockIdx.y % turns * G;
  const int queries =
      static_cast<int>(min(static_cast<int64_t>(G), (kv_head + 1) * sharing - first));
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = threadIdx.x % L;
  const int64_t slot = p.slots[row];
  T* const out = static_cast<T*>(p.result) + (row * p.heads + first) * kWidth;
  if (slot < 0) {
    if (blockIdx.x > 0) return;
    for (int i = threadIdx.x; i < queries * kWidth; i += kThreads) out[i] = store<T>(0);
    return;
  }

  // Which keys this block has.
  const int64_t begin = p.window > 0 ? max(slot + 1 - p.window, int64_t{0}) : 0,
                count = slot + 1 - begin;
  const int64_t each = max(kLeast, (count + gridDim.x - 1) / gridDim.x);
  const auto blocks = static_cast<unsigned>((count + each - 1) / each);
  if (blockIdx.x >= blocks) return;
  const int64_t from = begin + blockIdx.x * each, to = min(from + each, slot + 1);

  const int64_t position = p.positions[row];
  const T* const qkv =
      static_cast<const T*>(p.qkv) + row * (p.heads + 2 * p.kv_heads) * kWidth + part * kElements;
  float query[G][kElements];
#pragma unroll
  for (int g = 0; g < G; ++g) {
    read(qkv + (first + min(g, queries - 1)) * kWidth, query[g]);
    norm_and_rotate<T, L>(p, p.q_norm, position, query[g]);
#pragma unroll
    for (int i = 0; i < kElements; ++i) query[g][i] *= kLog2e * rsqrtf(static_cast<float>(kWidth));
  }
  float new_key[kElements], new_value[kElements];
  read(qkv + (p.heads + kv_head) * kWidth, new_key);
  norm_and_rotate<T, L>(p, p.k_norm, position, new_key);
  read(qkv + (p.heads + p.kv_heads + kv_head) * kWidth, new_value);

  const int64_t memory = (row * p.kv_heads + kv_head) * p.capacity * kWidth + part * kElements;
  T* const keys = static_cast<T*>(p.keys) + memory;
  T* const values = static_cast<T*>(p.values) + memory;
  Mix mixes[G];
  constexpr int kStride = kWarps * kGroups;
  for (int64_t base = from + warp * kGroups; base < to; base += kStride * kKeys) {
    float key[kKeys][kElements], value[kKeys][kElements];
#pragma unroll
    for (int k = 0; k < kKeys; ++k) {
      const int64_t index = base + k * kStride + lane / L;
      if (index < min(to, slot)) {
        read(keys + index * kWidth, key[k]);
        read(values + index * kWidth, value[k]);
      } else {
#pragma unroll
        for (int i = 0; i < kElements; ++i) key[k][i] = new_key[i], value[k][i] = new_value[i];
      }
    }
#pragma unroll
    for (int k = 0; k < kKeys; ++k) {
      const int64_t index = base + k * kStride + lane / L;
#pragma unroll
      for (int g = 0; g < G; ++g) {
        float score = 0;
#pragma unroll
        for (int i = 0; i < kElements; ++i) score = fmaf(query[g][i], key[k][i], score);
        score = sum_of_group<L>(score);
        mixes[g].add(index < to ? score : -INFINITY, value[k]);
      }
      if (index == slot) {
        write(keys + index * kWidth, new_key);
        write(values + index * kWidth, new_value);
      }
    }
  }

#pragma unroll
  for (int g = 0; g < G; ++g) {
#pragma unroll
    for (int offset = L; offset < 32; offset *= 2) mixes[g].merge_with_lane(offset);
    if (lane < L) {
      largest_of[warp][g] = mixes[g].largest;
      weight_of[warp][g] = mixes[g].weight;
#pragma unroll
      for (int i = 0; i < kElements; ++i) sums_of[warp][g][part * kElements + i] = mixes[g].sum[i];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < queries * kWidth; i += kThreads) {
    const int g = i / kWidth, element = i % kWidth;
    float largest = -INFINITY, weight = 0, sum = 0;
    for (int w = 0; w < kWarps; ++w) largest = fmaxf(largest, largest_of[w][g]);
    for (int w = 0; w < kWarps; ++w) {
      const float factor = exp2f(largest_of[w][g] - largest);
      weight += weight_of[w][g] * factor;
      sum += sums_of[w][g][element] * factor;
    }
    if (blocks == 1) {
      out[i] = store<T>(sum / weight);
      continue;
    }
    float* const mine = part_of(p, row, first + g, blockIdx.x);
    if (element == 0) mine[0] = largest, mine[1] = weight;
    mine[2 + element] = sum;
  }
  if (blocks == 1) return;

  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    // Counts to blocks - 1, then is 0 again.
    is_last = atomicInc(p.counters + row * gridDim.y + blockIdx.y, blocks - 1) == blocks - 1;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  for (int i = threadIdx.x; i < queries * kWidth; i += kThreads) {
    const int g = i / kWidth, element = i % kWidth;
    float largest = -INFINITY, weight = 0, sum = 0;
    for (unsigned b = 0; b < blocks; ++b)
      largest = fmaxf(largest, __ldcg(part_of(p, row, first + g, b)));
    for (unsigned b = 0; b < blocks; ++b) {
      const float* const its = part_of(p, row, first + g, b);
      const float factor = exp2f(__ldcg(its) - largest);
      weight += __ldcg(its + 1) * factor;
      sum += __ldcg(its + 2 + element) * factor;
    }
    out[i] = store<T>(sum / weight);
  }
}

int64_t queries_at_once(const DecodeAttention& p) { return p.heads == p.kv_heads ? 1 : 4; }
// Blocks for each row: of heads, and of keys.
int64_t head_blocks(const DecodeAttention& p) {
  const int64_t sharing = p.heads / p.kv_heads, at_once = queries_at_once(p);
  return p.kv_heads * ((sharing + at_once - 1) / at_once);
}
int64_t key_blocks(const DecodeAttention& p) {
  const int64_t most = (p.capacity + kLeast - 1) / kLeast;
  return std::clamp<int64_t>(kBlocksWanted / (p.rows * head_blocks(p)), 1, most);
}

template <class T, int L, int G>
void launch(const DecodeAttention& p, void* stream) {
  const dim3 blocks(static_cast<unsigned>(key_blocks(p)), static_cast<unsigned>(head_blocks(p)),
                    static_cast<unsigned>(p.rows));
  launch_dependent(&decode_attention_kernel<T, L, G>, blocks, kThreads, 0, stream, p);
}

template <class T, int L>
void launch_for_queries(const DecodeAttention& p, void* stream) {
  return queries_at_once(p) == 1 ? launch<T, L, 1>(p, stream) : launch<T, L, 4>(p, stream);
}

}  // namespace

bool can_launch(const DecodeAttention& p) {
  return (p.width == 32 || p.width == 64 || p.width == 128) && p.heads % p.kv_heads == 0 &&
         p.rows < (1 << 16) && head_blocks(p) < (1 << 16);
}

int64_t attention_scratch(const DecodeAttention& p) {
  return p.rows * p.heads * key_blocks(p) * (p.width + 2);
}

void launch_decode_attention(const DecodeAttention& p, DType dtype, void* stream) {
  launch_of_type(dtype, "attention", [&](auto type) {
    using T = decltype(type);
    switch (p.width / kElements) {
      case 4:
        return launch_for_queries<T, 4>(p, stream);
      case 8:
        return launch_for_queries<T, 8>(p, stream);
      default:
        return launch_for_queries<T, 16>(p, stream);
    }
  });
}

}  // namespace lockstep::nn::cuda
