// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/train/integrity/checksum_words.h"

namespace lockstep::train::detail {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kWordsOfThread = 16;
constexpr int64_t kMostBlocks = 4096;

template <class Word>
__global__ void sum_kernel(const Word* words, int64_t count, uint64_t first,
                           unsigned long long* total) {
  unsigned long long sum = 0;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += stride) {
    const uint64_t place = first + static_cast<uint64_t>(i);
    sum += words[i] *
           static_cast<uint64_t>(static_cast<uint32_t>(place % kRow) * kPlaceFactor | 1U) *
           (place / kRow * kRowFactor | 1U);
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_down_sync(~0U, sum, lanes);
  if (threadIdx.x % 32 == 0) atomicAdd(total, sum);
}

template <class Word>
void launch(const Words& words, unsigned long long* sum, cudaStream_t stream) {
  const int64_t blocks = std::clamp<int64_t>(
      (words.count + kThreads * kWordsOfThread - 1) / (kThreads * kWordsOfThread), 1, kMostBlocks);
  sum_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      static_cast<const Word*>(words.data), words.count, words.first, sum);
}

}  // namespace

void launch_sum(const Words& words, int64_t* sum, void* stream) {
  auto* const total = reinterpret_cast<unsigned long long*>(sum);
  auto* const queue = static_cast<cudaStream_t>(stream);
  if (words.width == 4) {
    launch<uint32_t>(words, total, queue);
  } else if (words.width == 2) {
    launch<uint16_t>(words, total, queue);
  } else {
    launch<uint8_t>(words, total, queue);
  }
  if (const cudaError_t failure = cudaGetLastError(); failure != cudaSuccess)
    throw Error(std::string("checksum of state: ") + cudaGetErrorString(failure));
}

}  // namespace lockstep::train::detail
