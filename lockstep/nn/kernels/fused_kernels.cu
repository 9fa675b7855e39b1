// SPDX-License-Identifier: Apache-2.0
#include <cuda_pipeline.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <numeric>
#include <type_traits>

#include "lockstep/nn/kernels/amax.cuh"
#include "lockstep/nn/kernels/fused_kernels.h"
#include "lockstep/nn/kernels/packs.cuh"

namespace lockstep::nn::cuda {
namespace {

__device__ int64_t thread_index() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

// What threads share of the rows (b, t): 32 bits, whose divisions are quick.
struct TurnTiling {
  unsigned rows, length;   // B * T, T
  unsigned packs, items;   // of half a head, of a row
  unsigned rows_of_block;  // at most
};

// N elements of the first half of a head, and their partners in the second.
template <int N, class T>
__device__ unsigned turn(const TurnOptions& options, const TurnTiling& tiling, unsigned row,
                         unsigned item, T* out) {
  const int64_t half = options.shape.width / 2, i = item % tiling.packs * N;
  const int64_t b = row / tiling.length, t = row % tiling.length, head = item / tiling.packs;
  const HeadPart *parts = options.parts, &first_part = parts[0], &second_part = parts[1];
  const bool in_first = head < first_part.heads;
  const bool in_second = head < first_part.heads + second_part.heads;
  const HeadPart& part = in_first ? first_part : in_second ? second_part : parts[2];
  const int64_t before = in_first    ? 0
                         : in_second ? first_part.heads
                                     : first_part.heads + second_part.heads;
  const auto place = [&](const HeadStrides& strides, int64_t of_head) {
    return b * strides.batch + t * strides.position + of_head * strides.head + i;
  };
  const T* source = static_cast<const T*>(part.memory) + place(part.strides, head - before);
  T* target = out + place(options.to, head);
  float first[N], second[N];
  read(source, first);
  read(source + half, second);
  if (part.turned) {
    const float* cosines = options.table + t * half + i;
    const float* sines = cosines + options.table_positions * half;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float cosine = cosines[k], sine = options.sign * sines[k];
      const float a = first[k], b = second[k];
      first[k] = a * cosine - b * sine;
      second[k] = b * cosine + a * sine;
    }
  }
  write(target, first);
  write(target + half, second);
  return max(largest_of<T>(first), largest_of<T>(second));
}

template <int N, class T>
__global__ void turn_kernel(TurnOptions options, TurnTiling tiling, T* out) {
  const unsigned first = blockIdx.x * tiling.rows_of_block;
  const unsigned end = min(tiling.rows_of_block, tiling.rows - first) * tiling.items;
  unsigned largest = 0;
  for (unsigned i = threadIdx.x; i < end; i += blockDim.x) {
    const unsigned found =
        turn<N>(options, tiling, first + i / tiling.items, i % tiling.items, out);
    largest = max(largest, found);
  }
  if (options.amax != nullptr) add_amax(largest, options.amax);
}

__device__ float sigmoid(float x) { return 1 / (1 + __expf(-x)); }

template <int N, class T>
__device__ unsigned gate(int64_t rows, int64_t width, const T* gate_up, T* out) {
  const int64_t packs = width / N, index = thread_index();
  if (index >= rows * packs) return 0;
  const int64_t row = index / packs, i = index % packs * N;
  float gate[N], up[N];
  read(gate_up + row * 2 * width + i, gate);
  read(gate_up + row * 2 * width + width + i, up);
#pragma unroll
  for (int k = 0; k < N; ++k) up[k] *= gate[k] * sigmoid(gate[k]);
  write(out + row * width + i, up);
  return largest_of<T>(up);
}

template <int N, class T>
__global__ void swiglu_kernel(int64_t rows, int64_t width, const T* gate_up, T* out, float* amax) {
  const unsigned largest = gate<N>(rows, width, gate_up, out);
  if (amax != nullptr) add_amax(largest, amax);
}

template <int N, class T>
__device__ unsigned gate_backward(int64_t rows, int64_t width, const T* gate_up, const T* grad,
                                  T* grad_gate_up) {
  const int64_t packs = width / N, index = thread_index();
  if (index >= rows * packs) return 0;
  const int64_t row = index / packs, i = index % packs * N;
  float gate[N], up[N], out[N];
  read(gate_up + row * 2 * width + i, gate);
  read(gate_up + row * 2 * width + width + i, up);
  read(grad + row * width + i, out);
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const float s = sigmoid(gate[k]), silu = gate[k] * s;
    const float slope = s * (1 + gate[k] * (1 - s));
    gate[k] = out[k] * up[k] * slope;
    up[k] = out[k] * silu;
  }
  write(grad_gate_up + row * 2 * width + i, gate);
  write(grad_gate_up + row * 2 * width + width + i, up);
  return max(largest_of<T>(gate), largest_of<T>(up));
}

template <int N, class T>
__global__ void swiglu_backward_kernel(int64_t rows, int64_t width, const T* gate_up, const T* grad,
                                       T* grad_gate_up, float* amax) {
  const unsigned largest = gate_backward<N>(rows, width, gate_up, grad, grad_gate_up);
  if (amax != nullptr) add_amax(largest, amax);
}

// The largest logit seen and the sum of exp(logit - largest): what softmax needs to know of a row.
struct Summary {
  float largest, sum;
};

__device__ Summary combine(Summary a, Summary b) {
  const float largest = fmaxf(a.largest, b.largest);
  // Of two empty ones the difference would be NaN.
  if (largest == -INFINITY) return a;
  return {largest, a.sum * __expf(a.largest - largest) + b.sum * __expf(b.largest - largest)};
}

__device__ Summary combine_warp(Summary summary) {
  for (int offset = 16; offset > 0; offset /= 2) {
    const Summary other{__shfl_xor_sync(~0u, summary.largest, offset),
                        __shfl_xor_sync(~0u, summary.sum, offset)};
    summary = combine(summary, other);
  }
  return summary;
}

// All threads of the block get the result. Always in the same order, so always with the same bits.
__device__ Summary combine_block(Summary summary) {
  __shared__ Summary warps[32];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  summary = combine_warp(summary);
  if (lane == 0) warps[warp] = summary;
  __syncthreads();
  summary = lane < blockDim.x / 32 ? warps[lane] : Summary{-INFINITY, 0};
  return combine_warp(summary);
}

// exp(x) without the instructions that __expf() has for results below the normal numbers, which
// are 0 here.
__device__ float quick_exp(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * 1.44269504F));
  return result;
}

template <int N>
__device__ void add_values(const float (&values)[N], Summary& summary) {
  float largest = values[0];
#pragma unroll
  for (int k = 1; k < N; ++k) largest = fmaxf(largest, values[k]);
  if (largest == -INFINITY) {  // exp(-inf - -inf) would be NaN; a NaN is not the largest
    float total = 0;
    for (int k = 0; k < N; ++k) total += values[k];
    if (isnan(total)) summary = {0, NAN};
    return;
  }
  if (largest > summary.largest) {  // soon no more
    summary.sum *= __expf(summary.largest - largest);
    summary.largest = largest;
  }
#pragma unroll
  for (int k = 0; k < N; ++k) summary.sum += quick_exp(values[k] - summary.largest);
}

// Packs of a row that a thread keeps in shared memory at the most.
constexpr int kMostKept = 8;

// A block for each row. With kKeeps it is read once and kept in shared memory for the gradient,
// else it is read again.
template <int N, bool kKeeps, class T>
__global__ void __launch_bounds__(1024, 2)
    cross_entropy_kernel(CrossEntropyShape shape, const T* logits, const int64_t* targets,
                         float scale, T* gradient, float* losses) {
  extern __shared__ __align__(16) unsigned char kept_bytes[];
  T* const kept = reinterpret_cast<T*>(kept_bytes);
  const int64_t row = blockIdx.x, target = targets[row];
  const int classes = static_cast<int>(shape.classes);
  const T* in = logits + row * classes;
  T* out = gradient + row * classes;
  const int step = static_cast<int>(blockDim.x) * N, first = static_cast<int>(threadIdx.x) * N;
  float values[N];
  if (target == shape.ignored) {
    for (int k = 0; k < N; ++k) values[k] = 0;
    for (int i = first; i < classes; i += step) write(out + i, values);
    if (threadIdx.x == 0) losses[row] = 0;
    return;
  }
  Summary summary{-INFINITY, 0};
  if constexpr (kKeeps) {  // all of it is on its way before the first is needed
#pragma unroll
    for (int j = 0; j < kMostKept; ++j) {
      const int i = first + j * step;
      if (i < classes) __pipeline_memcpy_async(kept + i, in + i, sizeof(Pack<T, N>));
      __pipeline_commit();
    }
#pragma unroll
    for (int j = 0; j < kMostKept; ++j) {
      __pipeline_wait_prior(kMostKept - 1 - j);
      const int i = first + j * step;
      if (i >= classes) continue;
      read(kept + i, values);  // what this thread has copied
      add_values(values, summary);
    }
  } else {
#pragma unroll 4
    for (int i = first; i < classes; i += step) {
      read(in + i, values);
      add_values(values, summary);
    }
  }
  summary = combine_block(summary);
  if (threadIdx.x == 0) {
    // A class that is not there has no logit: NaN is noticed, memory of others is not read.
    const float logit = target >= 0 && target < classes ? load(in[target]) : NAN;
    losses[row] = scale * (summary.largest + logf(summary.sum) - logit);
  }
  __syncthreads();  // the logit of the target is read before it is overwritten
  const float factor = scale / summary.sum;
#pragma unroll 2
  for (int i = first; i < classes; i += step) {
    read((kKeeps ? kept : in) + i, values);
#pragma unroll
    for (int k = 0; k < N; ++k) values[k] = quick_exp(values[k] - summary.largest) * factor;
    if (target >= i && target < i + N) {
#pragma unroll
      for (int k = 0; k < N; ++k) values[k] -= i + k == target ? scale : 0;
    }
    write(out + i, values);
  }
}

template <int N, class T>
__global__ void scale_kernel(int64_t count, T* data, const float* factor) {
  const float by = *factor;
  if (by == 1) return;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x * N;
  for (int64_t i = thread_index() * N; i < count; i += step) {
    float values[N];
    read(data + i, values);
#pragma unroll
    for (int k = 0; k < N; ++k) values[k] *= by;
    write(data + i, values);
  }
}

constexpr int64_t kThreads = 256;

unsigned blocks_for(int64_t threads) {
  return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
}

// Calls launch(element type, pack size): 16 bytes at a time where `divisor` elements and all
// addresses are multiples of that, single elements elsewhere.
template <class T, class Launch>
void launch_packed(int64_t divisor, std::initializer_list<const void*> addresses, Launch launch) {
  constexpr int kPack = 16 / sizeof(T);
  const bool aligned = std::all_of(addresses.begin(), addresses.end(), [](const void* address) {
    return reinterpret_cast<uintptr_t>(address) % 16 == 0;
  });
  if (aligned && divisor % kPack == 0) {
    launch(T{}, std::integral_constant<int, kPack>{});
  } else {
    launch(T{}, std::integral_constant<int, 1>{});
  }
}

template <class Launch>
void launch_for(DType dtype, const char* operation, int64_t divisor,
                std::initializer_list<const void*> addresses, Launch launch) {
  launch_of_type(dtype, operation,
                 [&](auto type) { launch_packed<decltype(type)>(divisor, addresses, launch); });
}

int64_t shared_bytes_of_processor() {
  int device = 0, bytes = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  return bytes;
}

int64_t common_divisor(const HeadStrides& strides) {
  return std::gcd(std::gcd(strides.batch, strides.position), strides.head);
}

}  // namespace

void launch_turn(const TurnOptions& options, DType dtype, void* out, void* stream) {
  const int64_t half = options.shape.width / 2, rows = options.shape.batch * options.shape.length;
  int64_t divisor = std::gcd(half, common_divisor(options.to)), heads = 0;
  for (const HeadPart& part : options.parts) {
    if (part.heads > 0) divisor = std::gcd(divisor, common_divisor(part.strides));
    heads += part.heads;
  }
  const auto& parts = options.parts;
  const auto addresses = {parts[0].memory, parts[1].memory, parts[2].memory,
                          static_cast<const void*>(out)};
  launch_for(dtype, "split_heads", divisor, addresses, [&](auto type, auto pack) {
    using T = decltype(type);
    constexpr int64_t kItems = 4 * kThreads;  // of a block, about
    const int64_t packs = half / pack, items = heads * packs;
    const int64_t of_block = std::max<int64_t>(1, kItems / items);
    if (rows > INT32_MAX || items * of_block > INT32_MAX)
      throw Error("[split_heads] too many positions or heads for one launch");
    const TurnTiling tiling{static_cast<unsigned>(rows),
                            static_cast<unsigned>(options.shape.length),
                            static_cast<unsigned>(packs), static_cast<unsigned>(items),
                            static_cast<unsigned>(of_block)};
    const auto blocks = static_cast<unsigned>((rows + of_block - 1) / of_block);
    turn_kernel<pack><<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(options, tiling,
                                                                                  typed<T>(out));
  });
}

void launch_swiglu(int64_t rows, int64_t width, DType dtype, const void* gate_up, void* out,
                   float* amax, void* stream) {
  launch_for(dtype, "swiglu", width, {gate_up, out}, [&](auto type, auto pack) {
    using T = decltype(type);
    swiglu_kernel<pack>
        <<<blocks_for(rows * width / pack), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
            rows, width, typed<T>(gate_up), typed<T>(out), amax);
  });
}

void launch_swiglu_backward(int64_t rows, int64_t width, DType dtype, const void* gate_up,
                            const void* grad, void* grad_gate_up, float* amax, void* stream) {
  launch_for(dtype, "swiglu", width, {gate_up, grad, grad_gate_up}, [&](auto type, auto pack) {
    using T = decltype(type);
    swiglu_backward_kernel<pack>
        <<<blocks_for(rows * width / pack), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
            rows, width, typed<T>(gate_up), typed<T>(grad), typed<T>(grad_gate_up), amax);
  });
}

void launch_cross_entropy(const CrossEntropyShape& shape, DType dtype, const void* logits,
                          const int64_t* targets, float scale, void* gradient, float* losses,
                          void* stream) {
  launch_for(dtype, "cross_entropy", shape.classes, {logits, gradient}, [&](auto type, auto pack) {
    using T = decltype(type);
    constexpr int64_t kMostThreads = 1024;
    const int64_t wanted = (shape.classes / pack + 31) / 32 * 32;
    // Two blocks of a processor at a time: one reads while the other writes. The permission is the
    // same in every call, since calls share it.
    const auto most = static_cast<int>((shared_bytes_of_processor() - 4096) / 2);
    const auto launch = [&](auto keeps, int bytes) {
      const auto kernel = cross_entropy_kernel<pack, keeps, T>;
      if (bytes > 0)
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
      const auto threads = static_cast<unsigned>(std::clamp<int64_t>(wanted, 32, kMostThreads));
      kernel<<<static_cast<unsigned>(shape.rows), threads, bytes,
               static_cast<cudaStream_t>(stream)>>>(shape, typed<T>(logits), targets, scale,
                                                    typed<T>(gradient), losses);
    };
    const int64_t bytes = shape.classes * static_cast<int64_t>(sizeof(T));
    // Copies to shared memory that the processor makes by itself are of 4 bytes at least.
    if (bytes <= most && pack * sizeof(T) >= 4 && wanted <= kMostKept * kMostThreads) {
      launch(std::true_type{}, static_cast<int>(bytes));
    } else {
      launch(std::false_type{}, 0);
    }
  });
}

void launch_scale_unless_one(int64_t count, DType dtype, void* data, const float* factor,
                             void* stream) {
  launch_for(dtype, "cross_entropy", count, {data}, [&](auto type, auto pack) {
    using T = decltype(type);
    // Few blocks: most have nothing to do.
    scale_kernel<pack><<<std::min(blocks_for(count / pack), 2112U), kThreads, 0,
                         static_cast<cudaStream_t>(stream)>>>(count, typed<T>(data), factor);
  });
}

}  // namespace lockstep::nn::cuda
