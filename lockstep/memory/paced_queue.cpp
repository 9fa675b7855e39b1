#include "lockstep/memory/paced_queue.h"

#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/memory/later_event.h"

namespace lockstep::memory::detail {
namespace {

// One that is copied, and one that follows it at once.
constexpr size_t kAtOnce = 2;

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
    LaterEvent event;
    thread_->run([this, event]() mutable { event.set(queue_->record()); }, "");
    return event.after(thread_->record());
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
