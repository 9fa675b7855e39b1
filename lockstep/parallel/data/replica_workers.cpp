// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/data/replica_workers.h"

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <latch>

#include "lockstep/optim/autocast.h"

namespace lockstep::parallel::detail {

// What operators do depends on state of the thread that calls them. This is the caller's, to be
// put on a worker for the time of one call.
class TorchState {
 public:
  explicit TorchState(const std::vector<c10::Device>& devices) {
    for (const c10::Device device : devices) {
      if (device.is_cpu()) continue;
      const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
      // Replicas may share a device; its stream is put back once.
      if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end())
        streams_.push_back(stream);
    }
  }

  void call(const std::function<void(size_t)>& body, size_t index, c10::Device device) const {
    const at::ThreadLocalStateGuard modes(modes_);
    // They also forget, at their end, casts of parameters as they were.
    const optim::AutocastGuard on_cpu(cpu_), on_cuda(cuda_);
    const c10::MultiStreamGuard streams(streams_);
    if (device.is_cpu()) return body(index);
    const c10::DeviceGuard current(device);
    body(index);
  }

 private:
  at::ThreadLocalState modes_;
  optim::AutocastOptions cpu_ = optim::current_autocast(at::kCPU);
  optim::AutocastOptions cuda_ = optim::current_autocast(at::kCUDA);
  std::vector<c10::Stream> streams_;
};

ReplicaWorkers::ReplicaWorkers(std::vector<c10::Device> devices)
    : devices_(std::move(devices)), todo_(devices_.size()), failures_(devices_.size()) {
  const auto on_cpu = std::count_if(devices_.begin(), devices_.end(),
                                    [](c10::Device device) { return device.is_cpu(); });
  const int threads = at::get_num_threads();
  const int share = std::max(1, threads / static_cast<int>(std::max<std::ptrdiff_t>(on_cpu, 1)));
  std::latch ready(static_cast<std::ptrdiff_t>(devices_.size()));
  for (size_t i = 0; i < devices_.size(); ++i) {
    threads_.emplace_back([this, i, threads, share, &ready](const std::stop_token& stop) {
      if (devices_[i].is_cpu() && share != threads) {
        at::get_num_threads();  // or torch would set the number when it is first needed here
        at::set_num_threads(share);
      }
      ready.count_down();
      work(stop, i);
    });
  }
  ready.wait();
  // The workers have changed the default for threads to come as well.
  if (share != threads) at::set_num_threads(threads);
}

void ReplicaWorkers::run(size_t count, const std::function<void(size_t)>& body) {
  const TorchState state(devices_);
  std::unique_lock lock(mutex_);
  body_ = &body;
  state_ = &state;
  std::fill_n(todo_.begin(), count, true);
  unfinished_ = count;
  std::fill(failures_.begin(), failures_.end(), nullptr);
  changed_.notify_all();
  changed_.wait(lock, [&] { return unfinished_ == 0; });
  for (const std::exception_ptr& failure : failures_) {
    if (failure) std::rethrow_exception(failure);
  }
}

void ReplicaWorkers::work(const std::stop_token& stop, size_t index) {
  std::unique_lock lock(mutex_);
  while (changed_.wait(lock, stop, [&] { return todo_[index]; })) {
    todo_[index] = false;
    const auto* body = body_;
    const TorchState* state = state_;
    lock.unlock();
    std::exception_ptr failure;
    try {
      state->call(*body, index, devices_[index]);
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    failures_[index] = failure;
    if (--unfinished_ == 0) changed_.notify_all();
  }
}

}  // namespace lockstep::parallel::detail
