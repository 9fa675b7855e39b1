// SPDX-License-Identifier: Apache-2.0
// An algorithm over the board, written as straight code that pauses wherever it must wait for
// peers.
#pragma once

#include <atomic>
#include <coroutine>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <utility>

namespace lockstep::fabric {

// "These counters have all reached `target`." They lie `stride` bytes apart, one for each rank from
// `next` to `end`.
struct Wait {
  const std::byte* counters = nullptr;
  size_t stride = 0;
  int next = 0, end = 0;  // ranks not yet seen to be there
  uint64_t target = 0;

  bool ready() {
    while (next < end) {
      const auto* counter = reinterpret_cast<const std::atomic<uint64_t>*>(
          counters + static_cast<size_t>(next) * stride);
      if (counter->load(std::memory_order_acquire) < target) return false;
      ++next;
    }
    return true;
  }
};

class Task {
 public:
  struct promise_type {
    Wait wait;
    std::exception_ptr failure;

    Task get_return_object() {
      return Task(std::coroutine_handle<promise_type>::from_promise(*this));
    }
    std::suspend_always initial_suspend() noexcept { return {}; }
    std::suspend_always final_suspend() noexcept { return {}; }
    void return_void() {}
    void unhandled_exception() { failure = std::current_exception(); }

    struct Pause {
      promise_type& promise;
      bool await_ready() { return promise.wait.ready(); }
      void await_suspend(std::coroutine_handle<>) const noexcept {}
      void await_resume() const noexcept {}
    };
    Pause await_transform(Wait next) {
      wait = next;
      return {*this};
    }
  };

  Task() = default;
  explicit Task(std::coroutine_handle<promise_type> handle) : handle_(handle) {}
  Task(Task&& other) noexcept : handle_(std::exchange(other.handle_, {})) {}
  Task& operator=(Task&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Task() {
    if (handle_) handle_.destroy();
  }

  bool done() const { return handle_.done(); }
  Wait& wait() { return handle_.promise().wait; }
  // Runs on to the next pause or the end; what it throws is thrown here.
  void resume() {
    handle_.resume();
    if (handle_.done() && handle_.promise().failure)
      std::rethrow_exception(handle_.promise().failure);
  }

 private:
  std::coroutine_handle<promise_type> handle_;
};

}  // namespace lockstep::fabric
