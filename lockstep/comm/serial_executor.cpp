// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/serial_executor.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

namespace lockstep::comm::detail {

struct SerialExecutor::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> jobs;
  bool started = false, closing = false;
};

SerialExecutor::SerialExecutor() : state_(std::make_shared<State>()) {}

SerialExecutor::~SerialExecutor() {
  const std::lock_guard lock(state_->mutex);
  state_->closing = true;
  state_->changed.notify_all();
}

void SerialExecutor::post(std::function<void()> job) {
  const std::lock_guard lock(state_->mutex);
  state_->jobs.push_back(std::move(job));
  state_->changed.notify_all();
  if (std::exchange(state_->started, true)) return;
  // Detached: the last job may be what lets go of this executor.
  std::thread([state = state_] {
    std::unique_lock thread_lock(state->mutex);
    while (true) {
      state->changed.wait(thread_lock, [&] { return state->closing || !state->jobs.empty(); });
      if (state->jobs.empty()) return;
      auto next = std::move(state->jobs.front());
      state->jobs.pop_front();
      thread_lock.unlock();
      next();
      next = nullptr;
      thread_lock.lock();
    }
  }).detach();
}

}  // namespace lockstep::comm::detail
