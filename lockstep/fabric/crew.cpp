// SPDX-License-Identifier: Apache-2.0
#include "lockstep/fabric/crew.h"

#include <algorithm>
#include <system_error>
#include <utility>

namespace lockstep::fabric {

Crew::Loan::Loan(Crew& crew, int helpers) : crew_(crew) {
  const std::lock_guard lock(crew_.mutex_);
  ++crew_.loans_;
  crew_.lent_ = std::max(crew_.lent_, helpers);
  crew_.call_helpers();
}

Crew::Loan::~Loan() {
  const std::lock_guard lock(crew_.mutex_);
  if (--crew_.loans_ == 0) crew_.lent_ = 0;
}

void Crew::run(int64_t parts, const std::function<void(int64_t)>& part) {
  std::unique_lock lock(mutex_);
  part_ = &part;
  next_ = 0;
  parts_ = parts;
  if (parts > 1) call_helpers();
  while (next_ < parts_) do_next(lock);
  done_.wait(lock, [this] { return running_ == 0; });
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

// With mutex_ held, but while the part is done.
void Crew::do_next(std::unique_lock<std::mutex>& lock) {
  const int64_t mine = next_++;
  const auto& part = *part_;
  lock.unlock();
  std::exception_ptr failure;
  try {
    part(mine);
  } catch (...) {
    failure = std::current_exception();
  }
  lock.lock();
  if (!failure) return;
  if (!failure_) failure_ = failure;
  next_ = parts_;
}

// With mutex_ held.
void Crew::call_helpers() {
  if (lent_ == 0 || next_ == parts_) return;
  try {
    while (static_cast<int>(helpers_.size()) < lent_) {
      const int number = static_cast<int>(helpers_.size());
      helpers_.emplace_back([this, number](const std::stop_token& stop) { help(stop, number); });
    }
  } catch (const std::system_error&) {
    // No more threads: those that exist do the work.
  }
  work_.notify_all();
}

void Crew::help(const std::stop_token& stop, int number) {
  std::unique_lock lock(mutex_);
  while (work_.wait(lock, stop, [&] { return next_ < parts_ && number < lent_; })) {
    ++running_;
    do_next(lock);
    if (--running_ == 0) done_.notify_one();
  }
}

}  // namespace lockstep::fabric
