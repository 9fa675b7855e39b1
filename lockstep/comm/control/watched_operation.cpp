// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/control/watched_operation.h"

#include <thread>
#include <utility>

#include "lockstep/comm/reduction_lowering.h"
#include "lockstep/core/error.h"

namespace lockstep::comm::detail {
namespace {

constexpr milliseconds kSoon{20};

}  // namespace

void Completion::part_done(std::exception_ptr error) {
  std::unique_lock lock(mutex_);
  has_begun_ = true;
  if (error && !error_) error_ = std::move(error);
  if (auto finish = error_ || parts_ == 1 ? std::exchange(finish_, nullptr) : nullptr;
      finish && !error_) {
    lock.unlock();
    try {
      finish();
    } catch (...) {
      error = std::current_exception();
    }
    finish = nullptr;
    lock.lock();
    error_ = std::move(error);
  }
  --parts_;
  if (parts_ == 0) finished_ = Clock::now();
  changed_.notify_all();
}

bool Completion::wait_for(milliseconds time) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, time, [this] { return parts_ == 0 || error_; });
}

void Completion::expect(size_t parts, std::function<void()> finish) {
  const std::lock_guard lock(mutex_);
  parts_ += parts;
  has_begun_ = true;
  finish_ = chain(std::move(finish), std::move(finish_));
}

bool Completion::has_begun() const {
  const std::lock_guard lock(mutex_);
  return has_begun_;
}

bool Completion::done() const {
  const std::lock_guard lock(mutex_);
  return parts_ == 0 || error_;
}

std::exception_ptr Completion::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

Clock::time_point Completion::finished() const {
  const std::lock_guard lock(mutex_);
  return finished_;
}

bool is_mismatch(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const MismatchError&) {
    return true;
  } catch (...) {
    return false;
  }
}

void WatchedPending::wait() {
  if (ended_) return;
  try {
    // What has begun already mostly ends soon, and then all ranks have announced it.
    if (operation_.unhurried) completion_->wait_for(kSoon);
    if (agreed_) owner_.watchdog.wait_for(*agreed_);
    owner_.watchdog.wait(operation_, sequence_, started_,
                         [this](milliseconds time) { return completion_->wait_for(time); });
    if (const auto error = completion_->error()) explain(error);
  } catch (...) {
    try {
      const std::exception_ptr error = std::current_exception();
      owner_.watchdog.fail(error, is_mismatch(error) && !fabric::is_message(operation_.kind));
    } catch (const std::exception& error) {
      owner_.on_broken(error.what());  // when the others have been told why
      throw;
    }
  }
  owner_.watchdog.end(operation_, sequence_);
  owner_.trace.add(operation_, sequence_, started_, completion_->finished());
  memory_.reset();
  ended_ = true;
}

void WatchedPending::explain(const std::exception_ptr& error) const {
  try {
    std::rethrow_exception(error);
  } catch (const MismatchError&) {
    throw;
  } catch (const DamagedData&) {
    throw;
  } catch (const std::exception& failure) {
    const std::string words = failure.what();
    // Engines have deadlines of their own, some as long as ours: whichever passes first.
    if (words.find("Timed out") != std::string::npos) {
      owner_.watchdog.wait(operation_, sequence_, started_, [](milliseconds time) {
        std::this_thread::sleep_for(time);
        return false;
      });
    }
    owner_.watchdog.explain(operation_, sequence_, words.substr(0, words.find('\n')));
  }
}

}  // namespace lockstep::comm::detail
