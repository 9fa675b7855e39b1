// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>

#include "lockstep/core/error.h"
#include "lockstep/nn/random/random_kernels.h"

namespace lockstep::nn::cuda {
namespace {

// How an element is stored, and the type it is computed in.
template <class T>
struct Element {
  using Value = T;
  static __device__ T load(T stored) { return stored; }
  static __device__ T store(T value) { return value; }
};
template <>
struct Element<__half> {
  using Value = float;
  static __device__ float load(__half stored) { return __half2float(stored); }
  static __device__ __half store(float value) { return __float2half_rn(value); }
};
template <>
struct Element<__nv_bfloat16> {
  using Value = float;
  static __device__ float load(__nv_bfloat16 stored) { return __bfloat162float(stored); }
  static __device__ __nv_bfloat16 store(float value) { return __float2bfloat16_rn(value); }
};

template <class T>
struct alignas(4 * sizeof(T)) Packed {
  T lane[4];
};

// The part of a Philox block that a run has: lanes begin to end, of which lane 0 is, or would be,
// at `place` in memory.
struct PhiloxSlice {
  int64_t block, place;
  int begin, end;

  __device__ bool has(int lane) const { return lane >= begin && lane < end; }
  template <class T>
  __device__ bool is_packed(const T* data) const {
    return begin == 0 && end == 4 &&
           reinterpret_cast<uintptr_t>(data + place) % sizeof(Packed<T>) == 0;
  }
};

template <class T>
__device__ Packed<T> load(const T* data, const PhiloxSlice& slice) {
  if (slice.is_packed(data)) return *reinterpret_cast<const Packed<T>*>(data + slice.place);
  Packed<T> values = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (slice.has(i)) values.lane[i] = data[slice.place + i];
  }
  return values;
}

template <class T>
__device__ void store(T* data, const PhiloxSlice& slice, const Packed<T>& values) {
  if (slice.is_packed(data)) {
    *reinterpret_cast<Packed<T>*>(data + slice.place) = values;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (slice.has(i)) data[slice.place + i] = values.lane[i];
    }
  }
}

// However a run lies, it has elements of no more blocks than this.
LOCKSTEP_HOST_DEVICE int64_t blocks_per_run(const Runs& runs) { return (runs.length + 6) / 4; }

// Each thread takes one block of one run at a time, then the one that is all threads further.
template <class Body>
__device__ void for_philox_slices(const Runs& runs, Body body) {
  const int64_t per_run = blocks_per_run(runs), total = per_run * runs.count;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const auto visit = [&](int64_t run, int64_t begin, int64_t nth) {
    const int64_t block = begin / 4 + nth, index = 4 * block, end = begin + runs.length;
    if (index >= end) return;
    body(PhiloxSlice{.block = block,
                     .place = run * runs.length + index - begin,
                     .begin = index < begin ? static_cast<int>(begin - index) : 0,
                     .end = end - index < 4 ? static_cast<int>(end - index) : 4});
  };
  if (runs.count == 1) {  // the usual case, without divisions
    for (; i < total; i += step) visit(0, runs.first, i);
  } else {
    for (; i < total; i += step) {
      const int64_t run = i / per_run;
      visit(run, runs.begin(run), i - run * per_run);
    }
  }
}

template <class T>
__global__ void fill_kernel(RandomKey key, Distribution distribution, Runs runs, T* out) {
  for_philox_slices(runs, [&](const PhiloxSlice& slice) {
    const auto words = random_words(key, slice.block);
    const bool is_normal = distribution.kind == Distribution::Kind::normal;
    const auto values = transform(is_normal ? to_normal(words) : to_uniform(words), distribution);
    Packed<T> stored;
    for (int i = 0; i < 4; ++i) {
      // A value that is not truncated is inside already.
      const float value = inside(values.lane[i], key, 4 * slice.block + i, distribution);
      stored.lane[i] = Element<T>::store(value);
    }
    store(out, slice, stored);
  });
}

template <class T>
__global__ void drop_kernel(RandomKey key, Drop drop, Runs runs, const T* in, T* out) {
  using Value = typename Element<T>::Value;
  const auto scale = static_cast<Value>(drop.scale);
  for_philox_slices(runs, [&](const PhiloxSlice& slice) {
    Packed<T> values = load(in, slice);
    const auto words = random_words(key, slice.block);
    for (int i = 0; i < 4; ++i) {
      const Value kept = Element<T>::load(values.lane[i]) * scale;
      values.lane[i] = Element<T>::store(words.lane[i] < drop.threshold ? Value{0} : kept);
    }
    store(out, slice, values);
  });
}

// Calls launch(typed null pointer, blocks, threads) for the dtype.
template <class Launch>
void launch_for(DType dtype, const Runs& runs, const char* operation, Launch launch) {
  constexpr int64_t kThreads = 256, kMaxBlocks = 1 << 14;
  const int64_t wanted = (blocks_per_run(runs) * runs.count + kThreads - 1) / kThreads;
  const auto blocks = static_cast<unsigned>(std::min(wanted, kMaxBlocks));
  switch (dtype) {
    case DType::float64:
      launch(static_cast<double*>(nullptr), blocks, kThreads);
      break;
    case DType::float32:
      launch(static_cast<float*>(nullptr), blocks, kThreads);
      break;
    case DType::float16:
      launch(static_cast<__half*>(nullptr), blocks, kThreads);
      break;
    case DType::bfloat16:
      launch(static_cast<__nv_bfloat16*>(nullptr), blocks, kThreads);
      break;
    default:
      check(false, "random kernels are for floating dtypes");
  }
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw Error("[" + std::string(operation) + "] CUDA: " + cudaGetErrorString(error));
  }
}

}  // namespace

void launch_fill(const RandomKey& key, const Distribution& distribution, const Runs& runs,
                 DType dtype, void* out, void* stream) {
  launch_for(dtype, runs, "fill", [&](auto* type, unsigned blocks, unsigned threads) {
    auto* data = static_cast<decltype(type)>(out);
    fill_kernel<<<blocks, threads, 0, static_cast<cudaStream_t>(stream)>>>(key, distribution, runs,
                                                                           data);
  });
}

void launch_drop(const RandomKey& key, const Drop& drop, const Runs& runs, DType dtype,
                 const void* in, void* out, void* stream) {
  launch_for(dtype, runs, "dropout", [&](auto* type, unsigned blocks, unsigned threads) {
    using Type = decltype(type);
    drop_kernel<<<blocks, threads, 0, static_cast<cudaStream_t>(stream)>>>(
        key, drop, runs, static_cast<const std::remove_pointer_t<Type>*>(in),
        static_cast<Type>(out));
  });
}

}  // namespace lockstep::nn::cuda
