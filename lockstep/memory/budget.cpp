// SPDX-License-Identifier: Apache-2.0
#include "lockstep/memory/budget.h"

#include <algorithm>
#include <condition_variable>
#include <limits>
#include <mutex>
#include <utility>

#include "lockstep/core/format.h"
#include "lockstep/core/size_text.h"

namespace lockstep::memory {

struct Budget::Books {
  Books(std::string given_name, size_t given_limit)
      : name(std::move(given_name)), limit(given_limit) {}

  size_t room() const {
    const size_t most = limit == 0 ? std::numeric_limits<size_t>::max() : limit;
    return most - std::min(used, most);
  }

  const std::string name;
  size_t limit;
  mutable std::mutex mutex;
  std::condition_variable returned;
  size_t used = 0, peak = 0;
};

Budget::Budget(std::string name, size_t limit)
    : books_(std::make_shared<Books>(std::move(name), limit)) {}

Budget::Share Budget::take(size_t bytes, std::string_view what) const {
  const std::lock_guard lock(books_->mutex);
  if (bytes > books_->room()) {
    throw OverBudget(format("[{}] {} for {} are too many: {} of {} are taken", books_->name,
                            size_text(bytes), what, size_text(books_->used),
                            size_text(books_->limit)));
  }
  books_->used += bytes;
  books_->peak = std::max(books_->peak, books_->used);
  return {books_, bytes};
}

Budget::Share Budget::take_over(size_t bytes) const {
  const std::lock_guard lock(books_->mutex);
  books_->used += bytes;
  books_->peak = std::max(books_->peak, books_->used);
  return {books_, bytes};
}

void Budget::extend(size_t bytes) const {
  const std::lock_guard lock(books_->mutex);
  check(books_->limit > 0, "a budget without a limit cannot be extended");
  books_->limit += bytes;
}

bool Budget::fits(size_t bytes) const {
  const std::lock_guard lock(books_->mutex);
  return bytes <= books_->room();
}

bool Budget::wait_until_fits(size_t bytes, std::chrono::milliseconds longest) const {
  std::unique_lock lock(books_->mutex);
  return books_->returned.wait_for(lock, longest, [&] { return bytes <= books_->room(); });
}

size_t Budget::used() const {
  const std::lock_guard lock(books_->mutex);
  return books_->used;
}

size_t Budget::peak() const {
  const std::lock_guard lock(books_->mutex);
  return books_->peak;
}

const std::string& Budget::name() const { return books_->name; }

size_t Budget::limit() const {
  const std::lock_guard lock(books_->mutex);
  return books_->limit;
}

double Budget::pressure() const {
  return limit() == 0 ? 0 : static_cast<double>(used()) / static_cast<double>(limit());
}

Budget::Share::~Share() {
  if (books_ == nullptr) return;
  {
    const std::lock_guard lock(books_->mutex);
    books_->used -= bytes_;
  }
  books_->returned.notify_all();
}

Budget::Share::Share(Share&& other) noexcept
    : books_(std::move(other.books_)), bytes_(std::exchange(other.bytes_, 0)) {}

Budget::Share& Budget::Share::operator=(Share&& other) noexcept {
  Share moved(std::move(other));
  std::swap(books_, moved.books_);
  std::swap(bytes_, moved.bytes_);
  return *this;
}

}  // namespace lockstep::memory
