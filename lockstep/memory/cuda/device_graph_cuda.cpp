// SPDX-License-Identifier: Apache-2.0
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/version.h>

#include <utility>

#include "lockstep/memory/device_graph.h"
#include "lockstep/memory/meter.h"

namespace lockstep::memory {
namespace {

class Graph final : public DeviceGraph {
 public:
  explicit Graph(c10::Device device) : device_(device) {}

  void repeat() override {
    const c10::cuda::CUDAGuard guard(device_);
    graph.replay();
  }

  at::cuda::CUDAGraph graph;

 private:
  c10::Device device_;
};

class Recorder final : public GraphRecorder {
 public:
  explicit Recorder(c10::Device device) : device_(device), pool_(at::cuda::graph_pool_handle()) {}
  ~Recorder() override { abandon(); }

  bool has_room() const override {
    const auto used =
        c10::cuda::CUDACachingAllocator::getDeviceStats(device_.index()).allocated_bytes[0].current;
    return cuda_room(device_) >= 2 * (highest_cuda_peak(device_) - used);
  }

  void begin() override {
    const c10::cuda::CUDAGuard guard(device_);
    if (!std::exchange(has_begun_, true)) {
      c10::cuda::getCurrentCUDAStream(device_.index()).synchronize();
      c10::cuda::CUDACachingAllocator::emptyCache();
    }
    graph_ = std::make_unique<Graph>(device_);
#if TORCH_VERSION_MAJOR >= 2
    // Other threads of this rank may use the device meanwhile, and one of autograd's may end it.
    graph_->graph.capture_begin(pool_, cudaStreamCaptureModeRelaxed);
#else
    graph_->graph.capture_begin(pool_);
#endif
  }

  std::unique_ptr<DeviceGraph> end() override {
    graph_->graph.capture_end();
    return std::move(graph_);
  }

  void abandon() override {
    if (!graph_) return;
    try {
      graph_->graph.capture_end();
    } catch (const std::exception&) {  // as it must, where what made the caller give up ended it
      leave_pool();
    }
    graph_.reset();
  }

 private:
  // What capture_end() does not come to: without it torch's allocator waits for the end of the
  // capture, and gives no memory back.
  void leave_pool() const {
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 4)
    try {
      c10::cuda::CUDACachingAllocator::endAllocateToPool(device_.index(), pool_);
      c10::cuda::CUDACachingAllocator::releasePool(device_.index(), pool_);
    } catch (const std::exception&) {  // capture_end() had done it
    }
#endif
  }

  c10::Device device_;
  at::cuda::MempoolId_t pool_;
  bool has_begun_ = false;
  std::unique_ptr<Graph> graph_;  // that is being recorded
};

}  // namespace

std::unique_ptr<GraphRecorder> make_graph_recorder(c10::Device device) {
  if (!device.is_cuda()) return nullptr;
  return std::make_unique<Recorder>(device);
}

}  // namespace lockstep::memory
