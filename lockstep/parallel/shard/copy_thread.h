// A thread that copies memory beside the computation. Private: not installed.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <thread>

namespace lockstep::parallel::detail {

// Jobs run one after the other. The thread is started by the first.
class CopyThread {
 public:
  explicit CopyThread(int rank) : rank_(rank) {}
  ~CopyThread();
  CopyThread(const CopyThread&) = delete;
  CopyThread& operator=(const CopyThread&) = delete;

  class Job {
   public:
    Job() = default;
    bool valid() const { return task_ != nullptr; }
    // Runs it here if the thread has not begun it, else waits; throws what it threw.
    void finish();

   private:
    friend class CopyThread;
    struct Task;
    std::shared_ptr<Task> task_;
  };

  Job start(std::function<void()> work);

 private:
  void run(const std::stop_token& stop);

  const int rank_;
  std::mutex mutex_;
  std::condition_variable_any arrived_;
  std::deque<std::shared_ptr<Job::Task>> queue_;
  std::jthread thread_;
};

}  // namespace lockstep::parallel::detail
