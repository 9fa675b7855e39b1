#include "lockstep/parallel/shard/copy_thread.h"

#include <atomic>
#include <utility>

#include "lockstep/core/trace.h"

namespace lockstep::parallel::detail {

struct CopyThread::Job::Task {
  explicit Task(std::function<void()> given) : work(std::move(given)) {}

  // Whoever comes first runs it. What it holds goes with that, not when the other has seen it too.
  void run() {
    if (claimed.exchange(true)) return;
    try {
      std::exchange(work, nullptr)();
      done.set_value();
    } catch (...) {
      done.set_exception(std::current_exception());
    }
  }

  std::function<void()> work;
  std::atomic<bool> claimed{false};
  std::promise<void> done;
};

void CopyThread::Job::finish() {
  const auto task = std::exchange(task_, nullptr);
  task->run();
  task->done.get_future().get();
}

CopyThread::Job CopyThread::start(std::function<void()> work) {
  Job job;
  job.task_ = std::make_shared<Job::Task>(std::move(work));
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(job.task_);
    if (!thread_.joinable()) {
      thread_ = std::jthread([this](const std::stop_token& stop) { run(stop); });
    }
  }
  arrived_.notify_one();
  return job;
}

void CopyThread::run(const std::stop_token& stop) {
  trace::name_thread(rank_, "parameter gather");
  for (;;) {
    std::shared_ptr<Job::Task> task;
    {
      std::unique_lock lock(mutex_);
      if (!arrived_.wait(lock, stop, [this] { return !queue_.empty(); })) return;
      task = std::move(queue_.front());
      queue_.pop_front();
    }
    task->run();
  }
}

CopyThread::~CopyThread() = default;

}  // namespace lockstep::parallel::detail
