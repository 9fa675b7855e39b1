// SPDX-License-Identifier: Apache-2.0
#include "lockstep/memory/queue_cuda.h"

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <chrono>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/core/clock.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/trace.h"
#include "lockstep/memory/event_wait.h"

namespace lockstep::memory::detail::cuda {
namespace {

using Handle = std::shared_ptr<CUevent_st>;

// A thread that waits sleeps: others compute on its core.
constexpr unsigned kForOrder = cudaEventDisableTiming | cudaEventBlockingSync;
constexpr unsigned kForTime = cudaEventDefault;

void check_cuda(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  cudaGetLastError();  // or torch takes it for its own
  throw Error(format("[queue] {}: {}", what, cudaGetErrorString(result)));
}

// Events are kept for the next user: to make one takes longer than to record it.
class EventPool {
 public:
  // On the current device.
  Handle take(unsigned flags) {
    int device = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    std::vector<cudaEvent_t>* free = nullptr;
    cudaEvent_t event = nullptr;
    {
      const std::lock_guard lock(mutex_);
      free = &free_[{device, flags}];
      if (!free->empty()) {
        event = free->back();
        free->pop_back();
      }
    }
    if (event == nullptr) {
      check_cuda(cudaEventCreateWithFlags(&event, flags), "cudaEventCreateWithFlags");
    }
    return {event, [this, free](cudaEvent_t used) {
              const std::lock_guard lock(mutex_);
              free->push_back(used);
            }};
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<int, unsigned>, std::vector<cudaEvent_t>> free_;  // of a device, with flags
};

// One for the process, because computed() belongs to no queue. Leaked on purpose: events may
// outlive everything, and CUDA may be gone before them.
EventPool& pool() {
  static auto* const instance = new EventPool;
  return *instance;
}

class CudaEvent final : public Event::Impl {
 public:
  explicit CudaEvent(cudaStream_t stream) : event_(pool().take(kForOrder)) {
    check_cuda(cudaEventRecord(event_.get(), stream), "cudaEventRecord");
  }
  bool passed() const override {
    const cudaError_t result = cudaEventQuery(event_.get());
    if (result == cudaErrorNotReady) {
      cudaGetLastError();
      return false;
    }
    check_cuda(result, "cudaEventQuery");
    return true;
  }
  void wait() const override {
    check_cuda(cudaEventSynchronize(event_.get()), "cudaEventSynchronize");
  }
  void* cuda_event() const override { return event_.get(); }

 private:
  Handle event_;
};

void wait_in_stream(const Event& event, cudaStream_t stream) {
  check_cuda(cudaStreamWaitEvent(stream, static_cast<cudaEvent_t>(event.cuda_event()), 0),
             "cudaStreamWaitEvent");
}

// Copies of one stream, in the trace once they are done: their times are CUDA's, counted from an
// event whose time is known on our clock.
class CopyTimes {
 public:
  CopyTimes(const QueueOptions& options, cudaStream_t stream)
      : row_(options.rank, options.name), stream_(stream) {
    set_base();
  }

  Handle mark() const {
    Handle event = pool().take(kForTime);
    check_cuda(cudaEventRecord(event.get(), stream_), "cudaEventRecord");
    return event;
  }
  void add(Handle begin, Handle end, std::string_view what, size_t bytes) {
    pending_.push_back({std::move(begin), std::move(end), std::string(what), bytes});
  }
  // Those that are done.
  void emit() {
    while (!pending_.empty() && cudaEventQuery(pending_.front().end.get()) == cudaSuccess) {
      const Copy& copy = pending_.front();
      row_.add("transfer", copy.what, time_of(copy.begin), time_of(copy.end),
               format("\"bytes\":{}", copy.bytes));
      pending_.pop_front();
    }
    cudaGetLastError();  // "not ready" is none
    // Times are floats, and the clocks drift: start again where nothing has to be waited for.
    if (pending_.empty() && seconds_since(base_time_) > 1 &&
        cudaStreamQuery(stream_) == cudaSuccess) {
      set_base();
    }
    cudaGetLastError();
  }

 private:
  struct Copy {
    Handle begin, end;
    std::string what;
    size_t bytes;
  };

  void set_base() {
    base_ = mark();
    check_cuda(cudaEventSynchronize(base_.get()), "cudaEventSynchronize");
    base_time_ = Clock::now();
  }
  Clock::time_point time_of(const Handle& event) const {
    float milliseconds = 0;
    check_cuda(cudaEventElapsedTime(&milliseconds, base_.get(), event.get()),
               "cudaEventElapsedTime");
    return base_time_ + std::chrono::duration_cast<Clock::duration>(
                            std::chrono::duration<double, std::milli>(milliseconds));
  }

  trace::Row row_;
  cudaStream_t stream_;
  Handle base_;
  Clock::time_point base_time_;
  std::deque<Copy> pending_;
};

class CudaQueue final : public Queue {
 public:
  CudaQueue(c10::cuda::CUDAStream stream, const QueueOptions& options) : stream_(stream) {
    if (trace::enabled()) times_ = std::make_unique<CopyTimes>(options, stream_.stream());
  }
  ~CudaQueue() override {
    try {
      const c10::cuda::CUDAGuard guard(stream_.device());
      check_cuda(cudaStreamSynchronize(stream_.stream()), "cudaStreamSynchronize");
      if (times_ != nullptr) times_->emit();
    } catch (const std::exception&) {
      // Threads that wait for queued work are told.
    }
  }

  void copy(void* to, const void* from, size_t bytes, std::string_view what) override {
    if (bytes == 0) return;
    const c10::cuda::CUDAGuard guard(stream_.device());
    const auto send = [&] {
      check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_.stream()),
                 "cudaMemcpyAsync");
    };
    if (times_ == nullptr) {
      send();
      return;
    }
    const std::lock_guard lock(mutex_);
    times_->emit();
    Handle begin = times_->mark();
    send();
    times_->add(std::move(begin), times_->mark(), what, bytes);
  }
  void run(std::function<void()>, std::string_view) override {
    check(false, "a CUDA queue has no host work");
  }
  void wait(const Event& event) override {
    if (event.cuda_event() == nullptr) {
      wait_in_thread(event);
      return;
    }
    const c10::cuda::CUDAGuard guard(stream_.device());
    wait_in_stream(event, stream_.stream());
  }
  Event record() override {
    const c10::cuda::CUDAGuard guard(stream_.device());
    return Event(std::make_shared<CudaEvent>(stream_.stream()));
  }
  void* stream() const override { return stream_.stream(); }

 private:
  const c10::cuda::CUDAStream stream_;
  std::mutex mutex_;  // of times_
  std::unique_ptr<CopyTimes> times_;
};

}  // namespace

std::shared_ptr<Queue> make_queue(c10::Device device, const QueueOptions& options) {
  const c10::cuda::CUDAGuard guard(device);
  return std::make_shared<CudaQueue>(
      c10::cuda::getStreamFromPool(/*isHighPriority=*/options.urgent, device.index()), options);
}

Event record_current(c10::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  return Event(
      std::make_shared<CudaEvent>(c10::cuda::getCurrentCUDAStream(device.index()).stream()));
}

void wait_current(const Event& event, c10::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  wait_in_stream(event, c10::cuda::getCurrentCUDAStream(device.index()).stream());
}

}  // namespace lockstep::memory::detail::cuda
