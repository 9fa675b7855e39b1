// SPDX-License-Identifier: Apache-2.0
// Bytes that may be held, and no more.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "lockstep/core/error.h"

namespace lockstep::memory {

// A handle: copies share the books. Thread safe.
class Budget {
 public:
  // `name` is what the limit is called where it is set: "offload.host_budget". 0: no limit.
  Budget(std::string name, size_t limit);

  // Holds bytes until it is destroyed. May outlive the budget.
  class Share;
  // Throws OverBudget: "[offload.host_budget] 512 MB for optimizer state of blocks.3 are too many:
  // 31.8 GB of 32.0 GB are taken".
  [[nodiscard]] Share take(size_t bytes, std::string_view what) const;
  // The same, but exceeds the limit instead of throwing: for what cannot be anywhere else. Then
  // take() throws until enough was given back.
  [[nodiscard]] Share take_over(size_t bytes) const;
  // The limit, which must not be 0, is higher by so many bytes from now on.
  void extend(size_t bytes) const;
  bool fits(size_t bytes) const;
  // Waits until so many bytes fit, because others give theirs back; at most this long.
  bool wait_until_fits(size_t bytes, std::chrono::milliseconds longest) const;

  const std::string& name() const;
  size_t used() const;
  size_t peak() const;
  size_t limit() const;
  double pressure() const;  // used / limit; 0 without a limit

 private:
  struct Books;
  std::shared_ptr<Books> books_;
};

class Budget::Share {
 public:
  Share() = default;
  ~Share();
  Share(Share&& other) noexcept;
  Share& operator=(Share&& other) noexcept;
  size_t bytes() const { return bytes_; }

 private:
  friend class Budget;
  Share(std::shared_ptr<Books> books, size_t bytes) : books_(std::move(books)), bytes_(bytes) {}
  std::shared_ptr<Books> books_;
  size_t bytes_ = 0;
};

}  // namespace lockstep::memory
