// SPDX-License-Identifier: Apache-2.0
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>

#include "lockstep/train/device.h"

namespace lockstep::train {

int64_t peak_cuda_bytes(c10::Device device) {
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(device.index());
  return stats.allocated_bytes[0].peak;  // of all pools
}

void make_current(c10::Device device) {
  if (device.is_cuda()) c10::cuda::set_device(device.index());
}

}  // namespace lockstep::train
