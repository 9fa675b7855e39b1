// SPDX-License-Identifier: Apache-2.0
// The part of CUDA's runtime that the NCCL backend calls, as a table: CUDA's own in a build with
// CUDA, a test's elsewhere. Every function throws CommError where CUDA reports an error.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "lockstep/comm/backends/nccl/api.h"

namespace lockstep::comm::nccl {

struct Runtime {
  // What tells each device that this process sees from all others of its host, in their order.
  std::vector<std::string> (*devices)();
  // The device that holds the tensor; -1 for host memory.
  int (*device_of)(const at::Tensor& tensor);
  c10::Device (*torch_device)(int device);
  // Of the calling thread; returns the one before.
  int (*exchange_device)(int device);

  // On the calling thread's device.
  CUstream_st* (*make_stream)();
  void (*free_stream)(CUstream_st* stream);
  CUstream_st* (*current_stream)(int device);  // torch's, of the calling thread
  void (*copy)(void* to, const void* from, size_t bytes, CUstream_st* stream);
  // Torch's operators in `body` are given to the stream, which is of this device.
  void (*give)(CUstream_st* stream, int device, const std::function<void()>& body);

  CUevent_st* (*make_event)(bool timed);
  void (*free_event)(CUevent_st* event);
  void (*record)(CUevent_st* event, CUstream_st* stream);
  void (*wait)(CUstream_st* stream, CUevent_st* event);  // the stream does, not the thread
  bool (*passed)(CUevent_st* event);
  void (*synchronize)(CUevent_st* event);
  double (*milliseconds_between)(CUevent_st* from, CUevent_st* to);
};

// Null in a build without CUDA.
const Runtime* cuda_runtime();

// What a group runs on.
struct Engine {
  const Api* api;
  const Runtime* runtime;
};

class DeviceGuard {
 public:
  DeviceGuard(const Runtime& runtime, int device)
      : runtime_(runtime), former_(runtime.exchange_device(device)) {}
  ~DeviceGuard() { runtime_.exchange_device(former_); }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  const Runtime& runtime_;
  int former_;
};

}  // namespace lockstep::comm::nccl
