// SPDX-License-Identifier: Apache-2.0
// Who may write into a folder of checkpoints. Private: not installed.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"

namespace lockstep::io {

// A process, known again by more than its number, which another process may get after it.
struct LockOwner {
  int64_t generation = 0;  // one more than that of the owner whose lock was taken over
  std::string host, boot;  // the name, and the random id that a host has until it is restarted
  std::string space;       // of process numbers
  int64_t pid = 0;
  int64_t start = 0;  // of the process, in clock ticks since the host was started
  std::string job, since;

  static LockOwner self();
  static std::optional<LockOwner> parse(const std::string& text);
  std::string text() const;
  std::string describe() const;  // "pid 17 on host a (job 5, since 2026-01-02T03:04:05Z)"
  bool operator==(const LockOwner&) const = default;
};

// Another process has taken the lock over, so this one may write no more.
class LockLost : public CheckpointError {
 public:
  using CheckpointError::CheckpointError;
};

// Holds DIR/.lock until it is destroyed. The kernel ends the lock of a process that dies, so its
// successor on the same host has it at once. Of an owner on another host, whose kernel may not have
// told ours, the file's time must be older than kLease; a thread renews that time.
class FolderLock {
 public:
  static constexpr std::string_view kName = ".lock";
  static constexpr std::chrono::seconds kLease{30};

  // Makes the folder. ConfigError that names the owner where another process has the lock, in less
  // than a second; SystemError where the folder cannot be written.
  explicit FolderLock(std::string dir);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

  // ConfigError as the constructor's; takes nothing and makes nothing.
  static void require_free(const std::string& dir);

  const std::string& dir() const { return dir_; }
  const LockOwner& owner() const { return owner_; }
  // Before a save. Takes the lock again where the whole folder was moved away since.
  void renew();
  // Before a commit. LockLost where the lock is another's now, or the file is gone.
  void require_held() const;

 private:
  void acquire();
  void beat(const std::stop_token& stop);

  const std::string dir_, path_;
  Fd fd_;
  LockOwner owner_;
  mutable std::mutex mutex_;  // of fd_, which the thread uses
  std::condition_variable_any ended_;
  std::jthread heart_;
};

}  // namespace lockstep::io
