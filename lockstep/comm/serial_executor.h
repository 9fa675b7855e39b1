// SPDX-License-Identifier: Apache-2.0
// Jobs one after another on a thread of their own.
#pragma once

#include <functional>
#include <memory>

namespace lockstep::comm::detail {

// The thread starts with the first job. Jobs must not throw. When the executor is destroyed its
// thread ends the jobs that it has; no thread waits for that, so they own all they need. Thread
// safe.
class SerialExecutor {
 public:
  SerialExecutor();
  ~SerialExecutor();
  SerialExecutor(const SerialExecutor&) = delete;
  SerialExecutor& operator=(const SerialExecutor&) = delete;

  void post(std::function<void()> job);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace lockstep::comm::detail
