// SPDX-License-Identifier: Apache-2.0
// A thread for every replica.
#pragma once

#include <c10/core/Device.h>

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace lockstep::parallel::detail {

class TorchState;

// Threads live as long as this does. Those of replicas on the CPU share its cores: together they
// use as many threads for one operator as the thread that made them does alone.
class ReplicaWorkers {
 public:
  explicit ReplicaWorkers(std::vector<c10::Device> devices);

  // Calls body(i) on thread i for all i < count and waits for them. They see the caller's grad
  // mode, autocast mode and streams, and have device i as the current one. If several throw, the
  // failure of the lowest i is rethrown. One call at a time.
  void run(size_t count, const std::function<void(size_t)>& body);

 private:
  void work(const std::stop_token& stop, size_t index);

  std::vector<c10::Device> devices_;
  std::mutex mutex_;
  std::condition_variable_any changed_;
  // The call in progress; worker i is to take part in it while todo_[i].
  const std::function<void(size_t)>* body_ = nullptr;
  const TorchState* state_ = nullptr;
  std::vector<bool> todo_;
  size_t unfinished_ = 0;
  std::vector<std::exception_ptr> failures_;
  std::vector<std::jthread> threads_;  // last: they end before the rest does
};

}  // namespace lockstep::parallel::detail
