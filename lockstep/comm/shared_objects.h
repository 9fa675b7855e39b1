// SPDX-License-Identifier: Apache-2.0
// Objects that ranks which are threads of one process hand to each other. Private to comm.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

namespace lockstep::comm::detail {

// What one rank puts here stays until that rank takes it away, so that a rank that comes late, when
// the other has given up, finds an object and not the stack of a function that has returned. The
// number can travel where only bytes do. Thread safe.
class SharedObjects {
 public:
  uint64_t put(std::shared_ptr<void> object) {
    const std::lock_guard lock(mutex_);
    objects_[++last_] = std::move(object);
    return last_;
  }
  std::shared_ptr<void> get(uint64_t number) {
    const std::lock_guard lock(mutex_);
    return objects_.at(number);
  }
  // When all ranks have taken a share in it.
  void remove(uint64_t number) {
    const std::lock_guard lock(mutex_);
    objects_.erase(number);
  }

 private:
  std::mutex mutex_;
  uint64_t last_ = 0;
  std::map<uint64_t, std::shared_ptr<void>> objects_;
};

}  // namespace lockstep::comm::detail
