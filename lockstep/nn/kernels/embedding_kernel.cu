// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>

#include "lockstep/nn/kernels/embedding_kernel.h"
#include "lockstep/nn/kernels/packs.cuh"

namespace lockstep::nn::cuda {
namespace {

constexpr int kChunk = 32;  // numbers
constexpr int kThreads = 128;

template <class T>
constexpr int kPackOf = 16 / sizeof(T);

template <int N>
__device__ void write_partial(float* to, const float (&values)[N]) {
#pragma unroll
  for (int k = 0; k < N; ++k) to[k] = values[k];
}

// A block has a chunk of the numbers, a thread a pack of columns. A run that the chunk begins in
// goes to the first partial row of the chunk, one that the chunk ends in to the second.
template <class T>
__global__ void __launch_bounds__(kThreads) sum_runs_kernel(RowSums sums) {
  constexpr int N = kPackOf<T>;
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x) * N;
  if (column >= sums.width) return;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kChunk;
  const int64_t end = min(begin + kChunk, sums.count);
  const auto* const gradient = static_cast<const T*>(sums.gradient);
  auto* const table = static_cast<T*>(sums.table);
  float* const partial = sums.partial + 2 * blockIdx.x * sums.width + column;
  const bool is_continued = begin > 0 && sums.sorted[begin - 1] == sums.sorted[begin];
  const bool continues = end < sums.count && sums.sorted[end] == sums.sorted[end - 1];

  bool is_first = true;
  float sum[N] = {};
  for (int64_t i = begin; i < end; ++i) {
    float values[N];
    read(gradient + sums.order[i] * sums.width + column, values);
#pragma unroll
    for (int k = 0; k < N; ++k) sum[k] += values[k];
    const int32_t row = sums.sorted[i];
    if (i + 1 < end && sums.sorted[i + 1] == row) continue;
    if (is_first && is_continued) {
      write_partial(partial, sum);
    } else if (i + 1 == end && continues) {
      write_partial(partial + sums.width, sum);
    } else {
      write(table + row * sums.width + column, sum);
    }
    is_first = false;
#pragma unroll
    for (int k = 0; k < N; ++k) sum[k] = 0;
  }
}

// A run that ends in another chunk than it begins in is summed by the block of the first.
template <class T>
__global__ void __launch_bounds__(kThreads) join_runs_kernel(RowSums sums) {
  constexpr int N = kPackOf<T>;
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x) * N;
  if (column >= sums.width) return;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kChunk;
  const int64_t end = min(begin + kChunk, sums.count);
  if (end == sums.count) return;
  const int32_t row = sums.sorted[end];
  const bool begins_before = begin > 0 && sums.sorted[begin - 1] == row;
  if (sums.sorted[end - 1] != row || begins_before) return;
  float sum[N] = {};
  const auto add = [&](int64_t partial_row) {
    const float* const from = sums.partial + partial_row * sums.width + column;
#pragma unroll
    for (int k = 0; k < N; ++k) sum[k] += from[k];
  };
  add(2 * static_cast<int64_t>(blockIdx.x) + 1);
  for (int64_t chunk = blockIdx.x + 1; chunk * kChunk < sums.count; ++chunk) {
    if (sums.sorted[chunk * kChunk] != row) break;
    add(2 * chunk);
  }
  write(static_cast<T*>(sums.table) + row * sums.width + column, sum);
}

}  // namespace

bool can_sum_rows(int64_t width, DType dtype) {
  return width % static_cast<int64_t>(16 / size_of(dtype)) == 0;
}

int64_t row_sum_chunks(int64_t count) { return (count + kChunk - 1) / kChunk; }

void launch_sum_rows(const RowSums& sums, DType dtype, void* stream) {
  launch_of_type(dtype, "embedding", [&](auto type) {
    using T = decltype(type);
    const int64_t columns = int64_t{kThreads} * kPackOf<T>;
    const dim3 grid(static_cast<unsigned>(row_sum_chunks(sums.count)),
                    static_cast<unsigned>((sums.width + columns - 1) / columns));
    auto* const queue = static_cast<cudaStream_t>(stream);
    sum_runs_kernel<T><<<grid, kThreads, 0, queue>>>(sums);
    join_runs_kernel<T><<<grid, kThreads, 0, queue>>>(sums);
  });
}

}  // namespace lockstep::nn::cuda
