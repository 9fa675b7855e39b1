// SPDX-License-Identifier: Apache-2.0
// Every failure that Lockstep reports is one of these, classed by what the caller can do about it.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace lockstep {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The input is wrong: fix it and start again.
class ConfigError : public Error {
 public:
  using Error::Error;
};

// The group is no longer usable: rebuild it, or end the job.
class CommError : public Error {
 public:
  using Error::Error;
};

// A peer is alive, as far as is known, but did not come in time.
class TimeoutError : public CommError {
 public:
  using CommError::CommError;
};

// A peer has died or has left the group.
class PeerLost : public CommError {
 public:
  PeerLost(int rank, const std::string& message) : CommError(message), rank_(rank) {}
  int rank() const { return rank_; }

 private:
  int rank_;
};

// Ranks called different operations, or the same one with different arguments.
class MismatchError : public CommError {
 public:
  using CommError::CommError;
};

// What arrived from a rank is not what that rank sent: a network, a memory, a library, or a program
// that wrote to a tensor before wait() returned, has changed it.
class DamagedData : public CommError {
 public:
  DamagedData(int rank, const std::string& message) : CommError(message), rank_(rank) {}
  int rank() const { return rank_; }  // that sent it

 private:
  int rank_;
};

// A checkpoint is damaged, incomplete or not what the model needs: use another.
class CheckpointError : public Error {
 public:
  using Error::Error;
};

// An operating system call failed; the message has what was tried and the system's reason.
class SystemError : public Error {
 public:
  SystemError(const std::string& what, int error_number);
  int error_number() const { return error_number_; }

 private:
  int error_number_;
};

// An allocation would exceed the memory limit of this rank: use less. docs/memory.md.
class OutOfMemory : public Error {
 public:
  // Bytes that were asked for, that were allocated already, and that are allowed.
  OutOfMemory(int64_t asked, int64_t held, int64_t limit);
  int64_t asked() const { return asked_; }
  int64_t held() const { return held_; }
  int64_t limit() const { return limit_; }

 private:
  int64_t asked_, held_, limit_;
};

// A budget of offload has no room for an allocation: raise the budget. docs/offload.md.
class OverBudget : public Error {
 public:
  using Error::Error;
};

// For rules that only a bug in Lockstep can break; user input gets a ConfigError.
inline void check(bool condition, const char* rule) {
  if (!condition) throw std::logic_error(std::string("lockstep bug: ") + rule);
}

}  // namespace lockstep
