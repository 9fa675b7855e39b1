// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/backends/mpi/worker.h"

#include <chrono>
#include <utility>

namespace lockstep::comm::mpi {

constexpr std::chrono::milliseconds kPatience{2};  // until a small collective is moved on

void Progress::end(std::exception_ptr failure) {
  finished = Clock::now();
  if (auto last = std::exchange(finish, nullptr); last && !failure) {
    try {
      last();
    } catch (...) {
      failure = std::current_exception();
    }
  }
  done = true;
  error = std::move(failure);
  memory.reset();
  changed.notify_all();
}

void Progress::test() {
  if (done) return;
  int complete = 0;
  try {
    check_mpi(MPI_Testall(static_cast<int>(running.requests.size()), running.requests.data(),
                          &complete, MPI_STATUSES_IGNORE),
              "MPI_Testall");
    if (complete != 0) end(nullptr);
  } catch (...) {
    end(std::current_exception());
  }
}

void Worker::work() {
  std::unique_lock lock(mutex);
  while (true) {
    if (!queue.empty()) {
      const Large next = std::move(queue.front());
      queue.pop_front();
      busy = true;
      lock.unlock();
      std::exception_ptr error;
      try {
        next.run(*large);
        if (const auto last = std::exchange(next.progress->finish, nullptr)) last();
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      busy = false;  // before anybody learns of the end and destroys the group
      const std::lock_guard progress_lock(next.progress->mutex);
      next.progress->end(error);
      continue;
    }
    if (stopping && in_flight.empty()) {
      unfinished.reset();
      return;
    }
    const auto is_over = [](const auto& item) {
      const std::lock_guard progress_lock(item->mutex);
      item->test();
      return item->done;
    };
    std::erase_if(in_flight, is_over);
    std::erase_if(small, is_over);
    const auto wanted = [this] { return !queue.empty(); };
    if (in_flight.empty() && small.empty()) {
      asleep = true;
      arrived.wait(lock,
                   [&] { return stopping || wanted() || !in_flight.empty() || !small.empty(); });
      asleep = false;
    }
    if (!in_flight.empty()) {
      arrived.wait_for(lock, std::chrono::microseconds(100), wanted);
    } else if (!small.empty()) {
      arrived.wait_for(lock, kPatience, [&] { return stopping || wanted() || !in_flight.empty(); });
    }
  }
}

}  // namespace lockstep::comm::mpi
