// SPDX-License-Identifier: Apache-2.0
// Monotonic time and deadlines. Nothing in Lockstep waits without one.
#pragma once

#include <algorithm>
#include <chrono>

namespace lockstep {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kDefaultTimeout{30'000};

class Deadline {
 public:
  explicit Deadline(milliseconds timeout) : at_(Clock::now() + timeout) {}
  bool passed() const { return Clock::now() >= at_; }
  milliseconds left() const {
    return std::max(milliseconds{0}, std::chrono::ceil<milliseconds>(at_ - Clock::now()));
  }
  Clock::time_point at() const { return at_; }

 private:
  Clock::time_point at_;
};

inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace lockstep
