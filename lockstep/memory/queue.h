// SPDX-License-Identifier: Apache-2.0
// Work that runs concurrently with the computation, in order.
//
//   auto in = memory::make_queue(device, {.rank = rank, .name = "to device"});
//   in->copy(target, source, bytes, "blocks.0");
//   memory::Event arrived = in->record();
//   memory::compute_after(arrived, device);   // what is computed from here on finds it
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

namespace lockstep::memory {

// A point in the order of a queue. Copies share. Default: one that has been passed.
class Event {
 public:
  class Impl {
   public:
    virtual ~Impl() = default;
    virtual bool passed() const = 0;
    virtual void wait() const = 0;  // by the calling thread; throws what the work threw
    virtual void* cuda_event() const { return nullptr; }  // cudaEvent_t
  };

  Event() = default;
  explicit Event(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  bool passed() const { return !impl_ || impl_->passed(); }
  void wait() const {
    if (impl_) impl_->wait();
  }
  void* cuda_event() const { return impl_ ? impl_->cuda_event() : nullptr; }

 private:
  std::shared_ptr<const Impl> impl_;
};

// Thread safe. Memory must live until what was queued is done. The first error of a run(), or of an
// event that the queue waits for, stays for good: what is queued after it is left out, and events
// recorded after it throw it from wait(). They pass, all the same, only when everything before them
// is done or left out and every event that the queue waited for has passed. (On CUDA errors are the
// stream's, and no less lasting.)
class Queue {
 public:
  // Returns when everything queued is done. Not by the queue's own work.
  virtual ~Queue() = default;

  // Between host and device memory, or within one; in a thread's queue within the host's.
  virtual void copy(void* to, const void* from, size_t bytes, std::string_view what) = 0;
  // Host work; it is destroyed when it is done. Without a name it is not in the trace. A CUDA queue
  // does not have it: check(false).
  virtual void run(std::function<void()> work, std::string_view what) = 0;
  // What is queued later comes after the event. A CUDA queue waits in its stream for an event of
  // CUDA, and for another one the calling thread does.
  virtual void wait(const Event& event) = 0;
  virtual Event record() = 0;
  // cudaStream_t, for kernels; null where the queue is a thread.
  virtual void* stream() const { return nullptr; }
};

struct QueueOptions {
  int rank = 0;           // in the trace
  std::string name = {};  // row of the trace
  bool urgent = false;    // on CUDA: kernels come before those of other streams
  // On CUDA: copies are handed to the device a few at a time, so that those of other queues do not
  // wait behind all of them; and those of the paced queue `behind` come first.
  bool paced = false;
  std::shared_ptr<Queue> behind = nullptr;
};

// A CUDA stream for a CUDA device, and a thread for the CPU, from the first action on. Both appear
// in the trace: "transfer" for copies, with bytes, "update" for run(), "wait" where a thread waits.
std::shared_ptr<Queue> make_queue(c10::Device device, QueueOptions options);
// A thread, whatever the device: waits for events of CUDA queues too.
std::shared_ptr<Queue> make_host_queue(QueueOptions options);

// A point in what the calling thread computes: the current stream's on CUDA, passed on the CPU.
Event computed(c10::Device device);
// What the calling thread computes after this comes after the event. On CUDA, events of a CUDA
// queue are waited for by the current stream and not by the thread.
void compute_after(const Event& event, c10::Device device);

}  // namespace lockstep::memory
