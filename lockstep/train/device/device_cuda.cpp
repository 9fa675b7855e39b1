// SPDX-License-Identifier: Apache-2.0
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
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

struct QueuedWork::Events {
  cudaEvent_t first = nullptr, last = nullptr;
  bool recorded = false;

  Events() {
    C10_CUDA_CHECK(cudaEventCreate(&first));
    C10_CUDA_CHECK(cudaEventCreate(&last));
  }
  Events(const Events&) = delete;
  Events& operator=(const Events&) = delete;
  ~Events() {
    cudaEventDestroy(first);
    cudaEventDestroy(last);
  }
};

QueuedWork::QueuedWork(c10::Device device) {
  if (device.is_cuda()) events_ = std::make_shared<Events>();
}

double QueuedWork::restart() {
  if (!events_) return 0;
  float milliseconds = 0;
  const bool known =
      events_->recorded && cudaEventQuery(events_->last) == cudaSuccess &&
      cudaEventElapsedTime(&milliseconds, events_->first, events_->last) == cudaSuccess;
  C10_CUDA_CHECK(cudaEventRecord(events_->first, c10::cuda::getCurrentCUDAStream()));
  return known ? milliseconds : 0;
}

void QueuedWork::end() {
  if (!events_) return;
  C10_CUDA_CHECK(cudaEventRecord(events_->last, c10::cuda::getCurrentCUDAStream()));
  events_->recorded = true;
}

}  // namespace lockstep::train
