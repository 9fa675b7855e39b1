// SPDX-License-Identifier: Apache-2.0
// Where a rank computes. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "lockstep/comm/group.h"
#include "lockstep/config/train_config.h"

namespace lockstep::train {

// The device that the configuration asks for. ConfigError where there is none, or where it cannot
// multiply matrices of the configured dtype.
c10::Device choose_device(const config::TrainConfig& config, const comm::Group& group);

// What CUDA's allocator has had at most; the device that libraries take where none is named; what
// the GPU is called: device_cuda.cpp, or device_no_cuda.cpp in builds without CUDA.
int64_t peak_cuda_bytes(c10::Device device);
void make_current(c10::Device device);
std::string cuda_name(c10::Device device);  // "NVIDIA H200"

// How long a GPU works on what is queued between restart() and end(). The CPU does not wait for it;
// on the CPU itself there is no queue, and the time is 0.
class QueuedWork {
 public:
  explicit QueuedWork(c10::Device device);

  double restart();  // milliseconds of the last pair, if the GPU has finished it; else 0
  void end();

 private:
  struct Events;
  std::shared_ptr<Events> events_;
};

}  // namespace lockstep::train
