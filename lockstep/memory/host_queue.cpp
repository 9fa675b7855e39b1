// SPDX-License-Identifier: Apache-2.0
// The queue that is a thread.
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "lockstep/core/format.h"
#include "lockstep/core/trace.h"
#include "lockstep/memory/event_wait.h"
#include "lockstep/memory/queue.h"

namespace lockstep::memory {
namespace {

class HostEvent final : public Event::Impl {
 public:
  void set(std::exception_ptr failure) {
    {
      const std::lock_guard lock(mutex_);
      passed_ = true;
      failure_ = std::move(failure);
    }
    changed_.notify_all();
  }
  bool passed() const override {
    const std::lock_guard lock(mutex_);
    return passed_;
  }
  void wait() const override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return passed_; });
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool passed_ = false;
  std::exception_ptr failure_;
};

class HostQueue final : public Queue {
 public:
  explicit HostQueue(QueueOptions options) : options_(std::move(options)) {}
  ~HostQueue() override {
    {
      const std::lock_guard lock(mutex_);
      closed_ = true;
    }
    arrived_.notify_one();
    // The thread ends when the line is empty, and is joined before the rest goes.
    thread_ = {};
  }

  void copy(void* to, const void* from, size_t bytes, std::string_view what) override {
    std::string name = trace::enabled() ? std::string(what) : "";
    append({.work = [=, name = std::move(name)] {
      const trace::Span span("transfer", name,
                             trace::enabled() ? format("\"bytes\":{}", bytes) : "");
      if (bytes > 0) std::memcpy(to, from, bytes);
    }});
  }
  void run(std::function<void()> work, std::string_view what) override {
    std::string name = trace::enabled() ? std::string(what) : "";
    if (name.empty()) return append({.work = std::move(work)});
    append({.work = [work = std::move(work), name = std::move(name)] {
      const trace::Span span("update", name);
      work();
    }});
  }
  void wait(const Event& event) override { append({.awaited = event}); }
  Event record() override {
    const auto event = std::make_shared<HostEvent>();
    append({.event = event});
    return Event(event);
  }

 private:
  struct Action {
    std::function<void()> work = {};
    std::shared_ptr<HostEvent> event = {};  // or this
    std::optional<Event> awaited = {};      // or this
  };

  void append(Action action) {
    {
      const std::lock_guard lock(mutex_);
      line_.push_back(std::move(action));
      if (!thread_.joinable()) thread_ = std::jthread([this] { work_off(); });
    }
    arrived_.notify_one();
  }

  void work_off() {
    trace::name_thread(options_.rank, options_.name);
    std::exception_ptr failure;
    for (;;) {
      Action action;
      {
        std::unique_lock lock(mutex_);
        arrived_.wait(lock, [this] { return closed_ || !line_.empty(); });
        if (line_.empty()) return;
        action = std::move(line_.front());
        line_.pop_front();
      }
      if (action.event != nullptr) {
        action.event->set(failure);
        continue;
      }
      try {
        // Also after a failure: who frees memory when an event of this queue has passed counts on
        // it that those that the queue waited for have, too.
        if (action.awaited) {
          detail::wait_in_thread(*action.awaited);
        } else if (!failure) {
          action.work();
        }
      } catch (...) {
        if (!failure) failure = std::current_exception();
      }
    }
  }

  const QueueOptions options_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<Action> line_;
  bool closed_ = false;
  std::jthread thread_;
};

}  // namespace

std::shared_ptr<Queue> make_host_queue(QueueOptions options) {
  return std::make_shared<HostQueue>(std::move(options));
}

}  // namespace lockstep::memory
