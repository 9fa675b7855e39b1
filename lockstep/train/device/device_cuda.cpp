// SPDX-License-Identifier: Apache-2.0
#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>

#include "lockstep/memory/meter.h"
#include "lockstep/train/device/device.h"

namespace lockstep::train {

int64_t peak_cuda_bytes(c10::Device device) { return memory::highest_cuda_peak(device); }

void make_current(c10::Device device) {
  if (device.is_cuda()) c10::cuda::set_device(device.index());
}

std::string cuda_name(c10::Device device) {
  cudaDeviceProp properties{};
  if (cudaGetDeviceProperties(&properties, device.index()) != cudaSuccess) return {};
  return properties.name;
}

}  // namespace lockstep::train
