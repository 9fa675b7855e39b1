// SPDX-License-Identifier: Apache-2.0
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "lockstep/comm/backends/nccl/runtime.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::comm::nccl {
namespace {

// Errors stay with the thread until they are asked for, and torch would take them for its own.
void check_cuda(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  cudaGetLastError();
  throw CommError(format("[nccl] {}: {}", what, cudaGetErrorString(result)));
}

std::vector<std::string> devices() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return {};
  }
  std::vector<std::string> identities;
  for (int device = 0; device < count; ++device) {
    cudaDeviceProp properties{};
    check_cuda(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    std::string text;
    for (const char byte : properties.uuid.bytes)
      text += format("{:02x}", static_cast<unsigned char>(byte));
    identities.push_back(text);
  }
  return identities;
}

int device_of(const at::Tensor& tensor) {
  return tensor.is_cuda() ? static_cast<int>(tensor.get_device()) : -1;
}

c10::Device torch_device(int device) { return {c10::kCUDA, static_cast<c10::DeviceIndex>(device)}; }

// Torch's own way: it does not make a context on an unused device. A group that lives
// until the end of the process comes here when torch's own records are gone, and torch throws;
// whatever else is wrong with a device, the calls after this one say.
int exchange_device(int device) {
  try {
    const c10::impl::VirtualGuardImpl guard(c10::kCUDA);
    return guard.exchangeDevice(torch_device(device)).index();
  } catch (const c10::Error&) {
    return device;
  }
}

// Before other kernels: what is communicated is what others wait for.
cudaStream_t make_stream() {
  int least = 0, greatest = 0;
  cudaStream_t stream = nullptr;
  check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest),
             "cudaDeviceGetStreamPriorityRange");
  check_cuda(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest),
             "cudaStreamCreateWithPriority");
  return stream;
}

// Both may come when CUDA has gone, at the end of the process.
void free_stream(cudaStream_t stream) {
  if (cudaStreamDestroy(stream) != cudaSuccess) cudaGetLastError();
}
void free_event(cudaEvent_t event) {
  if (cudaEventDestroy(event) != cudaSuccess) cudaGetLastError();
}

cudaStream_t current_stream(int device) {
  return c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device)).stream();
}

void copy(void* to, const void* from, size_t bytes, cudaStream_t stream) {
  check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream), "cudaMemcpyAsync");
}

void give(cudaStream_t stream, int device, const std::function<void()>& body) {
  const c10::StreamGuard guard(
      c10::cuda::getStreamFromExternal(stream, static_cast<c10::DeviceIndex>(device)).unwrap());
  body();
}

cudaEvent_t make_event(bool timed) {
  cudaEvent_t event = nullptr;
  check_cuda(cudaEventCreateWithFlags(&event, timed ? cudaEventDefault : cudaEventDisableTiming),
             "cudaEventCreateWithFlags");
  return event;
}

void record(cudaEvent_t event, cudaStream_t stream) {
  check_cuda(cudaEventRecord(event, stream), "cudaEventRecord");
}

void wait(cudaStream_t stream, cudaEvent_t event) {
  check_cuda(cudaStreamWaitEvent(stream, event, 0), "cudaStreamWaitEvent");
}

bool passed(cudaEvent_t event) {
  const cudaError_t result = cudaEventQuery(event);
  if (result == cudaErrorNotReady) {
    cudaGetLastError();
    return false;
  }
  check_cuda(result, "cudaEventQuery");
  return true;
}

void synchronize(cudaEvent_t event) {
  check_cuda(cudaEventSynchronize(event), "cudaEventSynchronize");
}

double milliseconds_between(cudaEvent_t from, cudaEvent_t to) {
  float milliseconds = 0;
  check_cuda(cudaEventElapsedTime(&milliseconds, from, to), "cudaEventElapsedTime");
  return milliseconds;
}

constexpr Runtime kRuntime{
    .devices = devices,
    .device_of = device_of,
    .torch_device = torch_device,
    .exchange_device = exchange_device,
    .make_stream = make_stream,
    .free_stream = free_stream,
    .current_stream = current_stream,
    .copy = copy,
    .give = give,
    .make_event = make_event,
    .free_event = free_event,
    .record = record,
    .wait = wait,
    .passed = passed,
    .synchronize = synchronize,
    .milliseconds_between = milliseconds_between,
};

}  // namespace

const Runtime* cuda_runtime() { return &kRuntime; }

}  // namespace lockstep::comm::nccl
