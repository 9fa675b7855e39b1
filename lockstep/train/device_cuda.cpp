#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include <algorithm>

#include "lockstep/train/device.h"

namespace lockstep::train {

int64_t peak_cuda_bytes(c10::Device device) {
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(device.index());
  return stats.allocated_bytes[0].peak;  // of all pools
}

void make_current(c10::Device device) {
  if (device.is_cuda()) c10::cuda::set_device(device.index());
}

void limit_cuda_memory(int64_t bytes, c10::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  size_t available = 0, total = 0;
  C10_CUDA_CHECK(cudaMemGetInfo(&available, &total));
  const double share = std::min(1.0, static_cast<double>(bytes) / static_cast<double>(total));
  c10::cuda::CUDACachingAllocator::setMemoryFraction(share, c10::cuda::current_device());
}

}  // namespace lockstep::train
