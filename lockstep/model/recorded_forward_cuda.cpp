// SPDX-License-Identifier: Apache-2.0
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/version.h>

#include "lockstep/model/recorded_forward.h"

namespace lockstep::model {
namespace {

class Graph final : public RecordedForward {
 public:
  Graph(c10::Device device, const std::function<at::Tensor()>& forward) : device_(device) {
    const c10::cuda::CUDAStream stream =
        c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index());
    c10::cuda::getCurrentCUDAStream(device.index()).synchronize();
    const c10::cuda::CUDAStreamGuard guard(stream);
#if TORCH_VERSION_MAJOR >= 2
    // Other threads of this rank may use the device meanwhile.
    graph_.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
#else
    graph_.capture_begin();
#endif
    try {
      result_ = forward();
    } catch (...) {
      graph_.capture_end();
      throw;
    }
    graph_.capture_end();
  }

  at::Tensor repeat() override {
    const c10::cuda::CUDAGuard guard(device_);
    graph_.replay();
    return result_;
  }

 private:
  c10::Device device_;
  at::cuda::CUDAGraph graph_;
  at::Tensor result_;
};

}  // namespace

std::unique_ptr<RecordedForward> record(c10::Device device,
                                        const std::function<at::Tensor()>& forward) {
  if (!device.is_cuda()) return nullptr;
  return std::make_unique<Graph>(device, forward);
}

}  // namespace lockstep::model
