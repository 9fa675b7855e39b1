// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>

#include "lockstep/nn/kernels/amax.cuh"
#include "lockstep/nn/kernels/norm_kernels.h"
#include "lockstep/nn/kernels/packs.cuh"

namespace lockstep::nn::cuda {
namespace {

constexpr int kThreads = 512, kMostThreads = 1024, kWarps = kMostThreads / 32;

// A block has some rows at a time. A thread has one pack of each: all of a row is in registers.
struct Tiling {
  int lanes;  // threads of a row, whole warps
  int rows;   // of a block at a time
  int blocks;
};

template <class T>
constexpr int kPackOf = 16 / sizeof(T);

template <class T>
Tiling tiling_of(const NormShape& shape) {
  const auto packs = static_cast<int>(shape.width / kPackOf<T>);
  const int lanes = (packs + 31) / 32 * 32, rows = std::max(1, kThreads / lanes);
  const int64_t wanted = (shape.rows + rows - 1) / rows;
  const int64_t resident = int64_t{shape.processors} * std::max(1, 2048 / (lanes * rows));
  return {lanes, rows, static_cast<int>(std::min(wanted, resident))};
}

// The sum over the threads of a row, for each of them. Two buffers: the next sum may begin while
// this one is read.
__device__ float sum_of_row(float value, int lanes, float (&sums)[2][kWarps], int turn) {
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(~0U, value, offset);
  const int warp = static_cast<int>(threadIdx.x) / 32, warps = lanes / 32;
  if (threadIdx.x % 32 == 0) sums[turn][warp] = value;
  __syncthreads();
  float sum = 0;
  for (int i = warp / warps * warps, end = i + warps; i < end; ++i) sum += sums[turn][i];
  return sum;
}

template <class T>
__global__ void __launch_bounds__(kMostThreads, 2)
    rms_norm_kernel(NormShape shape, Tiling tiling, const T* x, const T* weight, T* out,
                    float* scales, float* amax) {
  constexpr int N = kPackOf<T>;
  __shared__ float sums[2][kWarps];
  const int lane = static_cast<int>(threadIdx.x) % tiling.lanes;
  const int group = static_cast<int>(threadIdx.x) / tiling.lanes;
  const int64_t column = static_cast<int64_t>(lane) * N;
  const bool has_column = column < shape.width;
  Pack<T, N> weights = {};
  if (has_column) weights = *reinterpret_cast<const Pack<T, N>*>(weight + column);
  unsigned largest = 0;
  int turn = 0;
  const int64_t step = static_cast<int64_t>(gridDim.x) * tiling.rows;
  const auto row_of = [&](int64_t row) {
    return has_column && row < shape.rows
               ? *reinterpret_cast<const Pack<T, N>*>(x + row * shape.width + column)
               : Pack<T, N>{};
  };
  int64_t first = static_cast<int64_t>(blockIdx.x) * tiling.rows;
  Pack<T, N> next = row_of(first + group);
  for (; first < shape.rows; first += step, turn ^= 1) {
    const int64_t row = first + group;
    const bool is_mine = has_column && row < shape.rows;
    float values[N];
#pragma unroll
    for (int k = 0; k < N; ++k) values[k] = load(next.lane[k]);
    next = row_of(row + step);  // on its way while this row is summed
    float squares = 0;
#pragma unroll
    for (int k = 0; k < N; ++k) squares += values[k] * values[k];
    const float sum = sum_of_row(squares, tiling.lanes, sums, turn);
    const float scale = rsqrtf(sum / static_cast<float>(shape.width) + shape.epsilon);
    if (!is_mine) continue;
#pragma unroll
    for (int k = 0; k < N; ++k) values[k] = values[k] * scale * load(weights.lane[k]);
    write(out + row * shape.width + column, values);
    if (lane == 0) scales[row] = scale;
    largest = max(largest, largest_of<T>(values));
  }
  if (amax != nullptr) add_amax(largest, amax);
}

// A warp has a row at a time, each thread PACKS of it: no thread waits for those of other warps.
template <class T, int PACKS>
__global__ void __launch_bounds__(kThreads / 2)
    rms_norm_rows_kernel(NormShape shape, const T* x, const T* weight, T* out, float* scales,
                         float* amax) {
  constexpr int N = kPackOf<T>;
  using Part = Pack<T, N>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto is_in = [&](int i) { return (lane + 32 * i) * N < shape.width; };
  Part weights[PACKS];
#pragma unroll
  for (int i = 0; i < PACKS; ++i)
    weights[i] = is_in(i) ? reinterpret_cast<const Part*>(weight)[lane + 32 * i] : Part{};
  const int64_t step = static_cast<int64_t>(gridDim.x) * (blockDim.x / 32);
  unsigned largest = 0;
  for (int64_t row = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
       row < shape.rows; row += step) {
    const auto* const from = reinterpret_cast<const Part*>(x + row * shape.width);
    Part parts[PACKS];
#pragma unroll
    for (int i = 0; i < PACKS; ++i) parts[i] = is_in(i) ? from[lane + 32 * i] : Part{};
    float squares = 0;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const float value = load(parts[i].lane[k]);
        squares += value * value;
      }
    }
    for (int offset = 16; offset > 0; offset /= 2) squares += __shfl_xor_sync(~0U, squares, offset);
    const float scale = rsqrtf(squares / static_cast<float>(shape.width) + shape.epsilon);
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      if (!is_in(i)) continue;
      float values[N];
#pragma unroll
      for (int k = 0; k < N; ++k)
        values[k] = load(parts[i].lane[k]) * scale * load(weights[i].lane[k]);
      write(out + row * shape.width + static_cast<int64_t>(lane + 32 * i) * N, values);
      largest = max(largest, largest_of<T>(values));
    }
    if (lane == 0) scales[row] = scale;
  }
  if (amax != nullptr) add_amax(largest, amax);
}

// Whether a warp can have a row of so many packs; launches the kernel for them.
template <class T, int PACKS = 1>
bool launch_rows(int64_t packs, const NormShape& shape, const T* x, const T* weight, T* out,
                 float* scales, float* amax, cudaStream_t stream) {
  constexpr int kThreadsOfRows = kThreads / 2;
  if (packs > 32 * PACKS) {
    if constexpr (PACKS < 8) {
      return launch_rows < T,
             PACKS < 4 ? PACKS + 1
                       : PACKS + 2 > (packs, shape, x, weight, out, scales, amax, stream);
    }
    return false;
  }
  const int64_t wanted = (shape.rows + kThreadsOfRows / 32 - 1) / (kThreadsOfRows / 32);
  const int64_t resident = int64_t{shape.processors} * (PACKS <= 4 ? 8 : 4);
  rms_norm_rows_kernel<T, PACKS>
      <<<static_cast<unsigned>(std::min(wanted, resident)), kThreadsOfRows, 0, stream>>>(
          shape, x, weight, out, scales, amax);
  return true;
}

template <class T>
__global__ void rms_norm_backward_kernel(NormShape shape, Tiling tiling, NormGradients gradients) {
  constexpr int N = kPackOf<T>;
  __shared__ float sums[2][kWarps];
  extern __shared__ float of_rows[];
  const int lane = static_cast<int>(threadIdx.x) % tiling.lanes;
  const int group = static_cast<int>(threadIdx.x) / tiling.lanes;
  const int64_t column = static_cast<int64_t>(lane) * N;
  const bool has_column = column < shape.width;
  float weights[N] = {}, partial[N] = {};
  if (has_column) read(static_cast<const T*>(gradients.weight) + column, weights);
  unsigned largest = 0;
  int turn = 0;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * tiling.rows; first < shape.rows;
       first += static_cast<int64_t>(gridDim.x) * tiling.rows, turn ^= 1) {
    const int64_t row = first + group, place = row * shape.width + column;
    const bool is_mine = has_column && row < shape.rows;
    float values[N] = {}, grads[N] = {}, around[N] = {};
    float scale = 0;
    if (is_mine) {
      scale = gradients.scales[row];
      read(static_cast<const T*>(gradients.x) + place, values);
      read(static_cast<const T*>(gradients.out) + place, grads);
      if (gradients.around != nullptr)
        read(static_cast<const T*>(gradients.around) + place, around);
    }
    float product = 0;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      values[k] *= scale;  // of root mean square 1
      partial[k] += grads[k] * values[k];
      grads[k] *= weights[k];
      product += grads[k] * values[k];
    }
    if (gradients.to_x == nullptr) continue;  // in all threads
    const float mean =
        sum_of_row(product, tiling.lanes, sums, turn) / static_cast<float>(shape.width);
    if (!is_mine) continue;
#pragma unroll
    for (int k = 0; k < N; ++k) grads[k] = scale * (grads[k] - values[k] * mean) + around[k];
    write(static_cast<T*>(gradients.to_x) + place, grads);
    largest = max(largest, largest_of<T>(grads));
  }
  if (gradients.amax != nullptr) add_amax(largest, gradients.amax);
  if (gradients.to_weight == nullptr) return;
  float* const mine = of_rows + static_cast<int64_t>(threadIdx.x) * N;
#pragma unroll
  for (int k = 0; k < N; ++k) mine[k] = partial[k];
  __syncthreads();
  if (group > 0 || !has_column) return;
  for (int other = 1; other < tiling.rows; ++other) {
    const float* const theirs = mine + static_cast<int64_t>(other) * tiling.lanes * N;
#pragma unroll
    for (int k = 0; k < N; ++k) partial[k] += theirs[k];
  }
  write(gradients.partial + blockIdx.x * shape.width + column, partial);
}

// A block sums 32 columns, each by 32 threads.
template <class T>
__global__ void sum_columns_kernel(int rows, int64_t width, const float* partial, T* out) {
  __shared__ float sums[32][33];
  const int64_t column = static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x;
  float sum = 0;
  if (column < width) {
    for (int row = static_cast<int>(threadIdx.y); row < rows; row += 32)
      sum += partial[row * width + column];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  sum = sums[threadIdx.x][threadIdx.y];
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0U, sum, offset);
  const int64_t to = static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.y;
  if (threadIdx.x == 0 && to < width) out[to] = store<T>(sum);
}

}  // namespace

bool can_norm(int64_t width, DType dtype) {
  const auto pack = static_cast<int64_t>(16 / size_of(dtype));
  return width % pack == 0 && width / pack >= 16 && width / pack <= kMostThreads;
}

void launch_rms_norm(const NormShape& shape, DType dtype, const void* x, const void* weight,
                     void* out, float* scales, float* amax, void* stream) {
  launch_of_type(dtype, "rms_norm", [&](auto type) {
    using T = decltype(type);
    if (launch_rows(shape.width / kPackOf<T>, shape, typed<T>(x), typed<T>(weight), typed<T>(out),
                    scales, amax, static_cast<cudaStream_t>(stream)))
      return;
    const Tiling tiling = tiling_of<T>(shape);
    rms_norm_kernel<<<tiling.blocks, tiling.lanes * tiling.rows, 0,
                      static_cast<cudaStream_t>(stream)>>>(
        shape, tiling, typed<T>(x), typed<T>(weight), typed<T>(out), scales, amax);
  });
}

int64_t norm_partial_rows(const NormShape& shape, DType dtype) {
  int64_t rows = 0;
  launch_of_type(dtype, "rms_norm",
                 [&](auto type) { rows = tiling_of<decltype(type)>(shape).blocks; });
  return rows;
}

void launch_rms_norm_backward(const NormShape& shape, DType dtype, const NormGradients& gradients,
                              void* stream) {
  launch_of_type(dtype, "rms_norm", [&](auto type) {
    using T = decltype(type);
    const Tiling tiling = tiling_of<T>(shape);
    const int threads = tiling.lanes * tiling.rows;
    auto* const queue = static_cast<cudaStream_t>(stream);
    const size_t shared = gradients.to_weight == nullptr
                              ? 0
                              : static_cast<size_t>(threads) * kPackOf<T> * sizeof(float);
    rms_norm_backward_kernel<T>
        <<<tiling.blocks, threads, shared, queue>>>(shape, tiling, gradients);
    if (gradients.to_weight == nullptr) return;
    sum_columns_kernel<<<static_cast<unsigned>((shape.width + 31) / 32), dim3(32, 32), 0, queue>>>(
        tiling.blocks, shape.width, gradients.partial, typed<T>(gradients.to_weight));
  });
}

}  // namespace lockstep::nn::cuda
