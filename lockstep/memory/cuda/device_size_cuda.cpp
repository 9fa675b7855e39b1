// SPDX-License-Identifier: Apache-2.0
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include "lockstep/core/system_memory.h"
#include "lockstep/memory/device_size.h"

namespace lockstep::memory {

int64_t device_bytes(c10::Device device) {
  if (!device.is_cuda()) return static_cast<int64_t>(available_memory());
  const c10::cuda::CUDAGuard guard(device);
  size_t available = 0, total = 0;
  C10_CUDA_CHECK(cudaMemGetInfo(&available, &total));
  return static_cast<int64_t>(total);
}

}  // namespace lockstep::memory
