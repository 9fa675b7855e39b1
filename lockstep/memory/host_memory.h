// SPDX-License-Identifier: Apache-2.0
// Host memory for what is offloaded: of exactly the size asked for, in whole pages.
#pragma once

#include <cstddef>
#include <memory>
#include <string_view>

#include "lockstep/memory/budget.h"

namespace lockstep::memory {

// pinned: locked in memory, so that a device can copy to and from it concurrently with the
// computation (with CUDA cudaHostRegister, without it mlock).
enum class HostKind { pageable, pinned };

// A handle, copies share. Thread safe. What was taken may outlive it.
class HostMemory {
 public:
  HostMemory(Budget budget, HostKind kind);

  // Zeros, at the beginning of a page. Throws OverBudget, and Error with the numbers and the limit
  // where the system does not let as much be pinned; then nothing is held.
  std::shared_ptr<std::byte> take(size_t bytes, std::string_view what) const;

  // What take() counts for so many bytes.
  static size_t rounded(size_t bytes);

  const Budget& budget() const { return budget_; }
  HostKind kind() const { return kind_; }

 private:
  Budget budget_;
  HostKind kind_;
};

}  // namespace lockstep::memory
