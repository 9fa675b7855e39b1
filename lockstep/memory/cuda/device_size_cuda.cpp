// SPDX-License-Identifier: Apache-2.0
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>

#include "lockstep/core/system_memory.h"
#include "lockstep/memory/device_size.h"
#include "lockstep/memory/meter.h"

namespace lockstep::memory {
namespace {

// Of the process, like the allocator whose observer writes them.
std::atomic<int64_t> cuda_limit{0}, cuda_refused{0}, cuda_held{0};

// The most of each device before its peak was last reset: that is the allocator's, and others want
// to know it too.
struct EarlierPeaks {
  std::mutex mutex;
  std::map<c10::DeviceIndex, int64_t> bytes;

  static EarlierPeaks& all() {
    static EarlierPeaks all;
    return all;
  }
};

void watch_refusals() {
  static std::once_flag once;
  std::call_once(once, [] {
    c10::cuda::CUDACachingAllocator::attachOutOfMemoryObserver([](int64_t device, int64_t asked,
                                                                  int64_t, int64_t) {
      cuda_refused = asked;
      const auto stats =
          c10::cuda::CUDACachingAllocator::getDeviceStats(static_cast<c10::DeviceIndex>(device));
      cuda_held = stats.allocated_bytes[0].current;  // of all pools
    });
  });
}

}  // namespace

int64_t device_bytes(c10::Device device) {
  if (!device.is_cuda()) return static_cast<int64_t>(available_memory());
  const c10::cuda::CUDAGuard guard(device);
  size_t available = 0, total = 0;
  C10_CUDA_CHECK(cudaMemGetInfo(&available, &total));
  return static_cast<int64_t>(total);
}

void limit_device(c10::Device device, int64_t bytes) {
  if (!device.is_cuda()) return Meter::set_limit(bytes);
  if (bytes == 0 && cuda_limit == 0) return;
  watch_refusals();
  cuda_limit = bytes;
  const c10::cuda::CUDAGuard guard(device);
  const auto total = static_cast<double>(device_bytes(device));
  const double share = bytes == 0 ? 1 : std::min(1.0, static_cast<double>(bytes) / total);
  c10::cuda::CUDACachingAllocator::setMemoryFraction(share, c10::cuda::current_device());
}

int64_t cuda_peak(c10::Device device) {
  return c10::cuda::CUDACachingAllocator::getDeviceStats(device.index()).allocated_bytes[0].peak;
}

int64_t highest_cuda_peak(c10::Device device) {
  EarlierPeaks& earlier = EarlierPeaks::all();
  const std::lock_guard lock(earlier.mutex);
  return std::max(earlier.bytes[device.index()], cuda_peak(device));
}

void reset_cuda_peak(c10::Device device) {
  EarlierPeaks& earlier = EarlierPeaks::all();
  const std::lock_guard lock(earlier.mutex);
  int64_t& most = earlier.bytes[device.index()];
  most = std::max(most, cuda_peak(device));
  c10::cuda::CUDACachingAllocator::resetPeakStats(device.index());
}

int64_t cuda_room(c10::Device device) {
  const int64_t all = device_bytes(device), limit = cuda_limit;
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(device.index());
  return (limit > 0 ? std::min(all, limit) : all) - stats.allocated_bytes[0].current;
}

std::optional<OutOfMemory> cuda_refusal() {
  if (cuda_limit == 0 || cuda_refused == 0) return std::nullopt;
  return OutOfMemory(cuda_refused, cuda_held, cuda_limit);
}

}  // namespace lockstep::memory
