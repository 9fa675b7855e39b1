// SPDX-License-Identifier: Apache-2.0
// A thread that copies memory concurrently with the computation. Private: not installed.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <thread>

namespace lockstep::parallel::detail {

// A job is a number of pieces, which this thread takes one after the other; a thread that waits for
// the job takes some too. Jobs run one after the other. The thread is started by the first.
class CopyThread {
 public:
  explicit CopyThread(int rank) : rank_(rank) {}
  ~CopyThread();
  CopyThread(const CopyThread&) = delete;
  CopyThread& operator=(const CopyThread&) = delete;

  using Piece = std::function<void(size_t piece)>;

  class Job {
   public:
    Job() = default;
    bool valid() const { return task_ != nullptr; }
    // Takes part, by a way of its own to copy a piece, and waits; throws what a piece threw.
    void finish(const Piece& copy);

   private:
    friend class CopyThread;
    struct Task;
    std::shared_ptr<Task> task_;
  };

  // `copy` is kept, with what it holds, until the last piece is done.
  Job start(size_t pieces, Piece copy);

 private:
  void run(const std::stop_token& stop);

  const int rank_;
  std::mutex mutex_;
  std::condition_variable_any arrived_;
  std::deque<std::shared_ptr<Job::Task>> queue_;
  std::jthread thread_;
};

}  // namespace lockstep::parallel::detail
