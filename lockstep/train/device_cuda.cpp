// SPDX-License-Identifier: Apache-2.0
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAFunctions.h>

#include "lockstep/memory/meter.h"
#include "lockstep/train/device.h"

namespace lockstep::train {

int64_t peak_cuda_bytes(c10::Device device) { return memory::highest_cuda_peak(device); }

void make_current(c10::Device device) {
  if (device.is_cuda()) c10::cuda::set_device(device.index());
}

std::string cuda_name(c10::Device device) {
  return at::cuda::getDeviceProperties(device.index())->name;
}

}  // namespace lockstep::train
