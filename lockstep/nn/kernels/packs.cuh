// SPDX-License-Identifier: Apache-2.0
// What kernels for float32, float16 and bfloat16 share: elements are moved in packs, and computed
// with as float32. Private: not installed.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <string>

#include "lockstep/core/dtype.h"
#include "lockstep/core/error.h"

namespace lockstep::nn::cuda {

__device__ inline float load(float stored) { return stored; }
__device__ inline float load(__half stored) { return __half2float(stored); }
__device__ inline float load(__nv_bfloat16 stored) { return __bfloat162float(stored); }
template <class T>
__device__ inline T store(float value);
template <>
__device__ inline float store<float>(float value) {
  return value;
}
template <>
__device__ inline __half store<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ inline __nv_bfloat16 store<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

// N elements that are moved as one.
template <class T, int N>
struct alignas(N * sizeof(T)) Pack {
  T lane[N];
};

template <int N, class T>
__device__ inline void read(const T* from, float (&values)[N]) {
  const auto pack = *reinterpret_cast<const Pack<T, N>*>(from);
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = load(pack.lane[i]);
}

template <int N, class T>
__device__ inline void write(T* to, const float (&values)[N]) {
  Pack<T, N> pack;
#pragma unroll
  for (int i = 0; i < N; ++i) pack.lane[i] = store<T>(values[i]);
  *reinterpret_cast<Pack<T, N>*>(to) = pack;
}

template <class T>
const T* typed(const void* data) {
  return static_cast<const T*>(data);
}
template <class T>
T* typed(void* data) {
  return static_cast<T*>(data);
}

// Calls launch(T{}) for the type.
template <class Launch>
void launch_of_type(DType dtype, const char* operation, Launch launch) {
  switch (dtype) {
    case DType::float32:
      launch(float{});
      break;
    case DType::float16:
      launch(__half{});
      break;
    case DType::bfloat16:
      launch(__nv_bfloat16{});
      break;
    default:
      throw ConfigError("[" + std::string(operation) + "] dtype is " + std::string(name_of(dtype)) +
                        ", must be float32, float16 or bfloat16");
  }
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw Error("[" + std::string(operation) + "] CUDA: " + cudaGetErrorString(error));
  }
}

}  // namespace lockstep::nn::cuda
