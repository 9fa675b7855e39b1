// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/flat/copy_thread.h"

#include <atomic>
#include <utility>

#include "lockstep/core/trace.h"

namespace lockstep::parallel::detail {

struct CopyThread::Job::Task {
  Task(size_t given_pieces, Piece given) : pieces(given_pieces), copy(std::move(given)) {}

  // Copies pieces that have not been begun. Once the last is done, what the job holds can go,
  // even if another thread has yet to see that.
  void work(const Piece& how) {
    for (size_t piece = next++; piece < pieces; piece = next++) {
      try {
        how(piece);
      } catch (...) {
        if (!failed.exchange(true)) error = std::current_exception();
      }
      if (++num_done < pieces) continue;
      copy = nullptr;
      if (failed) {
        done.set_exception(error);
      } else {
        done.set_value();
      }
    }
  }

  const size_t pieces;
  Piece copy;
  std::atomic<size_t> next{0}, num_done{0};
  std::atomic<bool> failed{false};
  std::exception_ptr error;
  std::promise<void> done;
};

void CopyThread::Job::finish(const Piece& copy) {
  const auto task = std::exchange(task_, nullptr);
  task->work(copy);
  task->done.get_future().get();
}

CopyThread::Job CopyThread::start(size_t pieces, Piece copy) {
  Job job;
  job.task_ = std::make_shared<Job::Task>(pieces, std::move(copy));
  if (pieces == 0) job.task_->done.set_value();
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
    task->work([&](size_t piece) { task->copy(piece); });
  }
}

CopyThread::~CopyThread() = default;

}  // namespace lockstep::parallel::detail
