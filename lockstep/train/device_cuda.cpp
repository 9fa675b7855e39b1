// SPDX-License-Identifier: Apache-2.0
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <mutex>

#include "lockstep/train/device.h"

namespace lockstep::train {
namespace {

// Of the process, like the allocator whose observer writes them.
std::atomic<int64_t> limit{0}, refused{0}, held{0};

void watch_refusals() {
  static std::once_flag once;
  std::call_once(once, [] {
    c10::cuda::CUDACachingAllocator::attachOutOfMemoryObserver([](int64_t device, int64_t asked,
                                                                  int64_t, int64_t) {
      refused = asked;
      const auto stats =
          c10::cuda::CUDACachingAllocator::getDeviceStats(static_cast<c10::DeviceIndex>(device));
      held = stats.allocated_bytes[0].current;  // of all pools
    });
  });
}

}  // namespace

int64_t peak_cuda_bytes(c10::Device device) {
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(device.index());
  return stats.allocated_bytes[0].peak;  // of all pools
}

void make_current(c10::Device device) {
  if (device.is_cuda()) c10::cuda::set_device(device.index());
}

void limit_cuda_memory(int64_t bytes, c10::Device device) {
  watch_refusals();
  limit = bytes;
  const c10::cuda::CUDAGuard guard(device);
  size_t available = 0, total = 0;
  C10_CUDA_CHECK(cudaMemGetInfo(&available, &total));
  const double share = std::min(1.0, static_cast<double>(bytes) / static_cast<double>(total));
  c10::cuda::CUDACachingAllocator::setMemoryFraction(share, c10::cuda::current_device());
}

std::optional<OutOfMemory> cuda_refusal() {
  if (limit == 0 || refused == 0) return std::nullopt;
  return OutOfMemory(refused, held, limit);
}

}  // namespace lockstep::train
