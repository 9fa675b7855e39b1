// SPDX-License-Identifier: Apache-2.0
// A file descriptor that closes itself, and reads and writes that finish what they began.
#pragma once

#include <cstddef>
#include <span>
#include <utility>

#include "lockstep/core/clock.h"

namespace lockstep {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() { reset(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  void reset();
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_ = -1;
};

// Both throw SystemError, and TimeoutError at the deadline. read_full returns false at a clean end
// of file.
bool read_full(const Fd& fd, std::span<std::byte> bytes, const Deadline& deadline);
void write_full(const Fd& fd, std::span<const std::byte> bytes, const Deadline& deadline);

}  // namespace lockstep
