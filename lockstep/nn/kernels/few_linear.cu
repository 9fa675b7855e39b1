// SPDX-License-Identifier: Apache-2.0
// Products of few vectors with a matrix, limited by the memory that the matrix is read from: packs
// of it are on their way while others are computed with. A block has sixteen rows of the matrix at
// a time. Tensor cores multiply 16-bit numbers, for eight vectors as fast as for one. The norm
// before the product is computed by every block again, which costs less than a kernel of its own.
#include <algorithm>
#include <cstdint>

#include "lockstep/nn/kernels/decode_launch.h"
#include "lockstep/nn/kernels/dependent_launch.cuh"
#include "lockstep/nn/kernels/packs.cuh"

namespace lockstep::nn::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kTile = 16;   // rows of the matrix, of a block at a time
constexpr int kBlocks = 1;  // of a multiprocessor
constexpr int kDepth = 4;   // what a thread has on its way, in pairs of packs
constexpr int kMost = kMostCudaVectors;

template <class T>
inline constexpr int kLanes = 16 / sizeof(T);

__device__ float sum_of_warp(float value) {
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
  return value;
}

__device__ float sum_of_block(float value) {
  __shared__ float warps[kWarps];
  value = sum_of_warp(value);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0;
  for (int i = 0; i < kWarps; ++i) sum += warps[i];
  __syncthreads();
  return sum;
}

// Calls body(first element) for the packs of a vector that this thread has.
template <class T, class Body>
__device__ void for_my_packs(int64_t in, Body body) {
  for (int64_t i = threadIdx.x * kLanes<T>; i < in; i += kThreads * kLanes<T>) body(i);
}

// x[v] as the product takes it, in the block's memory.
template <class T>
__device__ void put_vector(const FewLinear& p, int64_t v, T* x) {
  constexpr int N = kLanes<T>;
  const T* from = static_cast<const T*>(p.x) + v * p.in;
  float values[N], weights[N], shifts[N];
  if (p.norm_weight == nullptr) {
    for_my_packs<T>(p.in, [&](int64_t i) {
      read(from + i, values);
      write(x + i, values);
    });
    return;
  }
  float mean = 0, squares = 0;
  if (p.norm_bias != nullptr) {
    for_my_packs<T>(p.in, [&](int64_t i) {
      read(from + i, values);
#pragma unroll
      for (int k = 0; k < N; ++k) mean += values[k];
    });
    mean = sum_of_block(mean) / static_cast<float>(p.in);
  }
  for_my_packs<T>(p.in, [&](int64_t i) {
    read(from + i, values);
#pragma unroll
    for (int k = 0; k < N; ++k) squares += (values[k] - mean) * (values[k] - mean);
  });
  const float scale = rsqrtf(sum_of_block(squares) / static_cast<float>(p.in) + p.epsilon);
  for_my_packs<T>(p.in, [&](int64_t i) {
    read(from + i, values);
    read(static_cast<const T*>(p.norm_weight) + i, weights);
    if (p.norm_bias != nullptr) read(static_cast<const T*>(p.norm_bias) + i, shifts);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      values[k] =
          (values[k] - mean) * scale * weights[k] + (p.norm_bias != nullptr ? shifts[k] : 0);
    }
    write(x + i, values);
  });
}

__device__ float gelu(float x) {
  return 0.5F * x * (1 + tanhf(0.7978845608028654F * (x + 0.044715F * x * x * x)));
}
__device__ float silu(float x) { return x / (1 + __expf(-x)); }

// Row `row` of the result, from the sums of one or, where it is gated, two rows of the matrix.
template <class T>
__device__ void put_result(const FewLinear& p, int64_t v, int64_t row, float sum, float gated) {
  const auto rounded = [](float value) { return load(store<T>(value)); };
  const auto with_bias = [&](float value, int64_t at) {
    return p.bias != nullptr ? value + load(static_cast<const T*>(p.bias)[at]) : value;
  };
  float value = with_bias(sum, row);
  if (p.activation == Activation::swiglu) {
    value = silu(rounded(value)) * rounded(with_bias(gated, row + p.out));
  } else if (p.activation == Activation::gelu) {
    value = gelu(rounded(value));
  }
  const int64_t at = v * p.out + row;
  if (p.residual != nullptr) value = rounded(value) + load(static_cast<const T*>(p.residual)[at]);
  static_cast<T*>(p.result)[at] = store<T>(value);
}

// Rows i and i + 8 of a tile are 8 apart in the matrix, or gate and up of one row of the result.
struct Tile {
  int64_t first;  // row of the result
  bool gated;
  int64_t out;

  __device__ int64_t row(int i) const {
    return gated ? first + i % 8 + (i < 8 ? 0 : out) : first + i;
  }
  __device__ bool has(int i) const { return gated ? first + i % 8 < out : first + i < out; }
};

// Two packs of each of which a lane has its elements: those of rows lane / 4 and lane / 4 + 8.
struct Pair {
  int4 low, high;
};

__device__ void multiply_add(float (&sums)[4], const uint32_t (&rows)[4], uint32_t b0, uint32_t b1,
                             __half) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "r"(b0), "r"(b1));
#endif
}
__device__ void multiply_add(float (&sums)[4], const uint32_t (&rows)[4], uint32_t b0, uint32_t b1,
                             __nv_bfloat16) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "r"(b0), "r"(b1));
#endif
}

// sums[2 i + j] += row lane / 4 + 8 i, times vector lane % 4 * 2 + j. A lane has 8 neighbouring
// elements of its rows and of vector lane / 4; which of a product's columns they are does not
// matter, because both have the same.
template <class T>
__device__ void add_products(float (&sums)[4], const Pair& pair, const int4& x) {
  const auto bits = [](int value) { return static_cast<uint32_t>(value); };
  multiply_add(sums, {bits(pair.low.x), bits(pair.high.x), bits(pair.low.y), bits(pair.high.y)},
               bits(x.x), bits(x.y), T{});
  multiply_add(sums, {bits(pair.low.z), bits(pair.high.z), bits(pair.low.w), bits(pair.high.w)},
               bits(x.z), bits(x.w), T{});
}
// The same without tensor cores: the four lanes of a row each have a part of its sums with all
// vectors, which are exchanged at the end.
__device__ float dot(const int4& a, const float (&x)[4]) {
  return fmaf(
      __int_as_float(a.x), x[0],
      fmaf(__int_as_float(a.y), x[1], fmaf(__int_as_float(a.z), x[2], __int_as_float(a.w) * x[3])));
}

// Elements between two vectors in the block's memory: lanes of neighbouring vectors read other
// banks.
template <class T>
__host__ __device__ int64_t pitch_of(int64_t in) {
  return in + 4 * kLanes<T>;
}

template <class T>
__global__ void __launch_bounds__(kThreads) few_linear_kernel(FewLinear p, int tiles) {
  constexpr int N = kLanes<T>;
  constexpr bool kIsFloat = sizeof(T) == 4;
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ float shared_sums[2][kWarps][kTile][kMost];
  T* const x = reinterpret_cast<T*>(memory);  // (vectors, pitch)
  const int64_t pitch = pitch_of<T>(p.in);
  const bool gated = p.activation == Activation::swiglu;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane / 4;
  const auto steps = static_cast<int>(p.in / (4 * N));  // a warp has 4 packs of each row in a step
  const int turns = (steps + kWarps * kDepth - 1) / (kWarps * kDepth);
  const auto tile_of = [&](int index) {
    return Tile{static_cast<int64_t>(index) * (gated ? kTile / 2 : kTile), gated, p.out};
  };
  const auto step_of = [&](int turn, int i) { return (turn * kDepth + i) * kWarps + warp; };

  Pair next[kDepth];
  const auto fetch = [&](const Tile& tile, int turn) {
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      const int step = step_of(turn, i);
      const auto pack_of = [&](int row) {
        if (step >= steps || !tile.has(row)) return make_int4(0, 0, 0, 0);
        const T* from = static_cast<const T*>(p.weight) + tile.row(row) * p.in;
        return __ldcs(reinterpret_cast<const int4*>(from) + step * 4 + lane % 4);
      };
      next[i] = {pack_of(quad), pack_of(quad + 8)};
    }
  };
  fetch(tile_of(blockIdx.x), 0);
  let_the_next_kernel_begin();
  wait_for_earlier_kernels();
#pragma unroll 1
  for (int v = 0; v < p.vectors; ++v) put_vector<T>(p, v, x + v * pitch);
  __syncthreads();

  int parity = 0;
  for (int index = blockIdx.x; index < tiles; index += gridDim.x, parity ^= 1) {
    const Tile tile = tile_of(index);
    float sums[kIsFloat ? 2 * kMost : 4] = {};
    for (int turn = 0; turn < turns; ++turn) {
      Pair now[kDepth];
#pragma unroll
      for (int i = 0; i < kDepth; ++i) now[i] = next[i];
      if (turn + 1 < turns) {
        fetch(tile, turn + 1);
      } else if (index + gridDim.x < tiles) {
        fetch(tile_of(index + gridDim.x), 0);
      }
#pragma unroll
      for (int i = 0; i < kDepth; ++i) {
        const int step = step_of(turn, i);
        if (step >= steps) break;
        const T* const from = x + (step * 4 + lane % 4) * N;
        if constexpr (kIsFloat) {
#pragma unroll
          for (int v = 0; v < kMost; ++v) {
            if (v >= p.vectors) break;
            float values[N];
            read(from + v * pitch, values);
            sums[v] += dot(now[i].low, values);
            sums[kMost + v] += dot(now[i].high, values);
          }
        } else {
          int4 bits = make_int4(0, 0, 0, 0);
          if (quad < p.vectors) bits = *reinterpret_cast<const int4*>(from + quad * pitch);
          add_products<T>(sums, now[i], bits);
        }
      }
    }
    auto& of_warp = shared_sums[parity][warp];
    if constexpr (kIsFloat) {
#pragma unroll
      for (int v = 0; v < 2 * kMost; ++v) {
        sums[v] += __shfl_xor_sync(~0u, sums[v], 1);
        sums[v] += __shfl_xor_sync(~0u, sums[v], 2);
        if (lane % 4 == 0) of_warp[quad + v / kMost * 8][v % kMost] = sums[v];
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) of_warp[quad + i / 2 * 8][lane % 4 * 2 + i % 2] = sums[i];
    }
    __syncthreads();
    const auto sum_of = [&](int row, int v) {
      float sum = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += shared_sums[parity][w][row][v];
      return sum;
    };
    const int row = threadIdx.x / kMost, v = threadIdx.x % kMost;
    if (row < (gated ? kTile / 2 : kTile) && v < p.vectors && tile.has(row)) {
      put_result<T>(p, v, tile.first + row, sum_of(row, v), gated ? sum_of(row + 8, v) : 0);
    }
  }
}

struct Device {
  int multiprocessors = 0, major = 0;
  size_t shared = 0;  // bytes of a block
};
Device device() {
  int index = 0, shared = 0;
  Device device;
  cudaGetDevice(&index);
  cudaDeviceGetAttribute(&device.multiprocessors, cudaDevAttrMultiProcessorCount, index);
  cudaDeviceGetAttribute(&device.major, cudaDevAttrComputeCapabilityMajor, index);
  cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
  device.shared = static_cast<size_t>(shared);
  return device;
}

template <class T>
size_t shared_bytes(const FewLinear& linear) {
  return static_cast<size_t>(linear.vectors * pitch_of<T>(linear.in)) * sizeof(T);
}

template <class T>
void launch(const FewLinear& linear, void* stream) {
  const auto kernel = &few_linear_kernel<T>;
  cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                       cudaFuncAttributeMaxDynamicSharedMemorySize,
                       static_cast<int>(shared_bytes<T>(linear)));
  const int64_t rows = linear.activation == Activation::swiglu ? kTile / 2 : kTile,
                tiles = (linear.out + rows - 1) / rows,
                blocks = std::min<int64_t>(tiles, kBlocks * device().multiprocessors);
  launch_dependent(kernel, dim3(static_cast<unsigned>(blocks)), kThreads, shared_bytes<T>(linear),
                   stream, linear, static_cast<int>(tiles));
}

}  // namespace

bool can_launch(const FewLinear& linear, DType dtype) {
  const bool known = dtype == DType::float32 || dtype == DType::float16 || dtype == DType::bfloat16;
  if (!known || linear.vectors < 1 || linear.vectors > kMostCudaVectors) return false;
  const auto is_aligned = [](const void* address) {
    return reinterpret_cast<uintptr_t>(address) % 16 == 0;
  };
  const Device now = device();
  const int64_t bytes = linear.in * static_cast<int64_t>(size_of(dtype));
  const size_t shared =
      dtype == DType::float32 ? shared_bytes<float>(linear) : shared_bytes<__half>(linear);
  constexpr size_t kOfSums = sizeof(float) * 2 * kWarps * kTile * kMost + 256;
  return bytes % 64 == 0 && now.major >= 8 && is_aligned(linear.x) && is_aligned(linear.weight) &&
         is_aligned(linear.norm_weight) && is_aligned(linear.norm_bias) &&
         shared + kOfSums <= now.shared;
}

void launch_few_linear(const FewLinear& linear, DType dtype, void* stream) {
  launch_of_type(dtype, "linear_of_few",
                 [&](auto type) { launch<decltype(type)>(linear, stream); });
}

}  // namespace lockstep::nn::cuda
