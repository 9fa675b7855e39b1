// SPDX-License-Identifier: Apache-2.0
// The largest magnitude of what the threads of a kernel have. Private: not installed.
#pragma once

#include <cuda_runtime.h>

#include "lockstep/nn/kernels/packs.cuh"

namespace lockstep::nn::cuda {

// The bits of magnitudes have their order, and those of NaN are above all: no atomic for floats is
// needed, and the result does not depend on the order.
__device__ inline unsigned magnitude(float value) { return __float_as_uint(value) & 0x7FFFFFFFU; }

// Of what write() stores of the values.
template <class T, int N>
__device__ inline unsigned largest_of(const float (&values)[N]) {
  unsigned largest = 0;
#pragma unroll
  for (int k = 0; k < N; ++k) largest = max(largest, magnitude(load(store<T>(values[k]))));
  return largest;
}

// All threads of the block call it. Most blocks find that the cell has as much already.
__device__ inline void add_amax(unsigned largest, float* amax) {
  __shared__ unsigned warps[32];
  for (int offset = 16; offset > 0; offset /= 2)
    largest = max(largest, __shfl_xor_sync(~0u, largest, offset));
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = largest;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (unsigned warp = 1; warp < blockDim.x / 32; ++warp) largest = max(largest, warps[warp]);
  auto* const cell = reinterpret_cast<unsigned*>(amax);
  if (largest > *static_cast<volatile unsigned*>(cell)) atomicMax(cell, largest);
}

}  // namespace lockstep::nn::cuda
