// SPDX-License-Identifier: Apache-2.0
// A CUDA runtime of threads and host memory. A thread's current stream, null, is the thread itself.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "lockstep/comm/backends/nccl/runtime.h"

// A thread that does what it is given, in order.
struct CUstream_st {
  CUstream_st()
      : thread([this](const std::stop_token& stop) {
          std::unique_lock lock(mutex);
          while (changed.wait(lock, stop, [this] { return !work.empty(); })) {
            auto next = std::move(work.front());
            work.pop_front();
            lock.unlock();
            next();
            lock.lock();
          }
        }) {}
  void add(std::function<void()> next) {
    const std::lock_guard lock(mutex);
    work.push_back(std::move(next));
    changed.notify_all();
  }

  std::mutex mutex;
  std::condition_variable_any changed;
  std::deque<std::function<void()>> work;
  std::jthread thread;
};

namespace lockstep::comm::fake {

extern const nccl::Runtime kRuntime;

}  // namespace lockstep::comm::fake
