// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/float8/float8_kernels.h"

#include <cuda_fp8.h>

#include <algorithm>
#include <cstdint>

#include "lockstep/nn/kernels/amax.cuh"
#include "lockstep/nn/kernels/packs.cuh"

namespace lockstep::nn::cuda {
namespace {

constexpr int kThreads = 256;

template <int N, class T>
__global__ void amax_kernel(int64_t packs, int64_t count, const T* data, float* amax) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  unsigned largest = 0;
  for (int64_t i = first; i < packs; i += step) {
    float values[N];
    read(data + i * N, values);
#pragma unroll
    for (int k = 0; k < N; ++k) largest = max(largest, magnitude(values[k]));
  }
  for (int64_t i = packs * N + first; i < count; i += step)
    largest = max(largest, magnitude(load(data[i])));
  add_amax(largest, amax);
}

// Eight codes of eight elements.
template <class T>
__device__ uint2 codes_of(const T* from, float scale, __nv_fp8_interpretation_t kind) {
  constexpr int kPack = 16 / sizeof(T);
  uint16_t pairs[4];
#pragma unroll
  for (int i = 0; i < 8; i += kPack) {
    float values[kPack];
    read(from + i, values);
#pragma unroll
    for (int k = 0; k < kPack; k += 2) {
      pairs[(i + k) / 2] = __nv_cvt_float2_to_fp8x2(
          make_float2(values[k] * scale, values[k + 1] * scale), __NV_SATFINITE, kind);
    }
  }
  return {pairs[0] | static_cast<unsigned>(pairs[1]) << 16,
          pairs[2] | static_cast<unsigned>(pairs[3]) << 16};
}
__device__ uint2 codes_of(const uint8_t* from, float, __nv_fp8_interpretation_t) {
  return *reinterpret_cast<const uint2*>(from);
}

// A block has a tile of 128 rows and 64 columns, a thread four rows and eight columns of it, so
// that four codes of a column are one word. The tile is turned around in shared memory, of which
// the rows are one word longer than they need be: then no two threads wait for a bank.
constexpr int kTileRows = 128, kTileColumns = 64, kTileWords = kTileRows / 4;

template <class T>
__global__ void cast_kernel(CastOptions options, const T* data) {
  const auto kind = options.kind == Float8::e4m3 ? __NV_E4M3 : __NV_E5M2;
  float scale = 1;
  if (options.amax != nullptr) {
    const float amax = *options.amax;  // as float8_scale()
    scale = options.largest / (amax < kLeastAmax ? kLeastAmax : amax);
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *options.inverse = 1 / scale;
  }
  __shared__ unsigned tile[kTileColumns][kTileWords + 1];
  const int group = static_cast<int>(threadIdx.x) / 8, lane = static_cast<int>(threadIdx.x) % 8;
  const int64_t row = static_cast<int64_t>(blockIdx.y) * kTileRows + group * 4;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kTileColumns + lane * 8;
  uint2 codes[4] = {};
  if (column < options.columns) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (row + i >= options.rows) break;
      const int64_t place = (row + i) * options.columns + column;
      codes[i] = codes_of(data + place, scale, kind);
      if (options.codes != nullptr) *reinterpret_cast<uint2*>(options.codes + place) = codes[i];
    }
  }
  if (options.transposed == nullptr) return;
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const int shift = k % 4 * 8;
    unsigned word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      word |= ((k < 4 ? codes[i].x : codes[i].y) >> shift & 0xFFU) << (8 * i);
    tile[lane * 8 + k][group] = word;
  }
  __syncthreads();
  const int warp = static_cast<int>(threadIdx.x) / 32, word = static_cast<int>(threadIdx.x) % 32;
  const int64_t to_row = static_cast<int64_t>(blockIdx.y) * kTileRows + word * 4;
  if (to_row >= options.padded_rows) return;
  for (int i = warp; i < kTileColumns; i += kThreads / 32) {
    const int64_t to_column = static_cast<int64_t>(blockIdx.x) * kTileColumns + i;
    if (to_column >= options.columns) return;
    *reinterpret_cast<unsigned*>(options.transposed + to_column * options.padded_rows + to_row) =
        tile[i][word];
  }
}

template <class T>
void cast_tiles(const CastOptions& options, const T* data, void* stream) {
  const auto tiles = [](int64_t size, int64_t tile) {
    return static_cast<unsigned>((size + tile - 1) / tile);
  };
  const dim3 grid(tiles(options.columns, kTileColumns), tiles(options.padded_rows, kTileRows));
  cast_kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(options, data);
}

}  // namespace

void launch_amax(int64_t count, DType dtype, const void* data, float* amax, void* stream) {
  constexpr int64_t kBlocks = 1056;  // eight for each processor of a large GPU
  cudaMemsetAsync(amax, 0, sizeof(float), static_cast<cudaStream_t>(stream));
  launch_of_type(dtype, "fp8", [&](auto type) {
    using T = decltype(type);
    constexpr int kPack = 16 / sizeof(T);
    const bool aligned = reinterpret_cast<uintptr_t>(data) % 16 == 0;
    const int64_t packs = aligned ? count / kPack : 0;
    const int64_t wanted = ((aligned ? packs : count) + kThreads - 1) / kThreads;
    amax_kernel<kPack>
        <<<static_cast<unsigned>(std::clamp<int64_t>(wanted, 1, kBlocks)), kThreads, 0,
           static_cast<cudaStream_t>(stream)>>>(packs, count, typed<T>(data), amax);
  });
}

void launch_cast(const CastOptions& options, DType dtype, const void* data, void* stream) {
  launch_of_type(dtype, "fp8",
                 [&](auto type) { cast_tiles(options, typed<decltype(type)>(data), stream); });
}

void launch_transpose(int64_t rows, int64_t columns, int64_t padded_rows, const uint8_t* codes,
                      uint8_t* transposed, void* stream) {
  cast_tiles(CastOptions{.rows = rows,
                         .columns = columns,
                         .padded_rows = padded_rows,
                         .kind = Float8::e4m3,
                         .largest = 0,
                         .amax = nullptr,
                         .codes = nullptr,
                         .transposed = transposed,
                         .inverse = nullptr},
             codes, stream);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) throw Error(std::string("[fp8] CUDA: ") + cudaGetErrorString(error));
}

}  // namespace lockstep::nn::cuda
