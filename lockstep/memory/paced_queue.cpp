// SPDX-License-Identifier: Apache-2.0
#include "lockstep/memory/paced_queue.h"

#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "lockstep/core/error.h"

namespace lockstep::memory::detail {
namespace {

// One that is copied, and one that follows it at once.
constexpr size_t kAtOnce = 2;

// What the thread of a paced queue had handed over when it came to this point.
class PacedEvent final : public Event::Impl {
 public:
  explicit PacedEvent(std::weak_ptr<Queue> queue) : queue_(std::move(queue)) {}

  // By the queue's thread.
  void reach() const { handed_over(); }
  // Before anyone else has it. `reached`: after reach(), which is left out where the thread failed.
  void set(Event reached) { reached_ = std::move(reached); }

  bool passed() const override { return reached_.passed() && handed_over().passed(); }
  void wait() const override {
    std::exception_ptr failure;
    try {
      reached_.wait();
    } catch (...) {
      failure = std::current_exception();  // what was handed over before is on its way
    }
    handed_over().wait();
    if (failure) std::rethrow_exception(failure);
  }
  void* cuda_event() const override {
    reached_.wait();
    return handed_over().cuda_event();
  }

 private:
  Event handed_over() const {
    const std::lock_guard lock(mutex_);
    if (!event_) {
      const auto queue = queue_.lock();
      event_ = queue ? queue->record() : Event();  // it has gone, and everything was done
    }
    return *event_;
  }

  const std::weak_ptr<Queue> queue_;
  Event reached_;
  mutable std::mutex mutex_;
  mutable std::optional<Event> event_;
};

class PacedQueue final : public Queue {
 public:
  PacedQueue(std::shared_ptr<Queue> queue, const std::shared_ptr<Queue>& behind,
             QueueOptions options)
      : queue_(std::move(queue)),
        behind_(std::dynamic_pointer_cast<PacedQueue>(behind)),
        thread_(make_host_queue(std::move(options))) {}

  void copy(void* to, const void* from, size_t bytes, std::string_view what) override {
    const std::string name(what);
    thread_->run(
        [this, to, from, bytes, name] {
          if (under_way_.size() == kAtOnce) wait_for_first();
          while (const auto other = behind_ ? behind_->under_way() : std::nullopt) other->wait();
          queue_->copy(to, from, bytes, name);
          const std::lock_guard lock(mutex_);
          under_way_.push_back(queue_->record());
        },
        what);
  }
  void run(std::function<void()>, std::string_view) override {
    check(false, "a paced queue has no host work");
  }
  // By the thread, so that what was handed over can be copied at once.
  void wait(const Event& event) override { thread_->wait(event); }
  Event record() override {
    const auto event = std::make_shared<PacedEvent>(queue_);
    thread_->run([event] { event->reach(); }, "");
    event->set(thread_->record());
    return Event(event);
  }

 private:
  void wait_for_first() {
    under_way_.front().wait();
    const std::lock_guard lock(mutex_);
    under_way_.pop_front();
  }
  std::optional<Event> under_way() const {
    const std::lock_guard lock(mutex_);
    for (const Event& event : under_way_) {
      if (!event.passed()) return event;
    }
    return std::nullopt;
  }

  const std::shared_ptr<Queue> queue_;
  const std::shared_ptr<const PacedQueue> behind_;
  mutable std::mutex mutex_;
  std::deque<Event> under_way_;          // changed by the thread alone
  const std::shared_ptr<Queue> thread_;  // ends before the rest goes
};

}  // namespace

std::shared_ptr<Queue> make_paced_queue(std::shared_ptr<Queue> queue,
                                        const std::shared_ptr<Queue>& behind,
                                        QueueOptions options) {
  options.name += ", in line";
  return std::make_shared<PacedQueue>(std::move(queue), behind, std::move(options));
}

}  // namespace lockstep::memory::detail
