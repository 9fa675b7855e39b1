// SPDX-License-Identifier: Apache-2.0
// The device's part of the memory that Lockstep manages.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <memory>
#include <string_view>

#include "lockstep/memory/budget.h"

namespace lockstep::memory {

// What comes and goes is put at the other end of the stretch, so that it leaves no small gaps
// between what stays.
enum class Stay { long_time, short_time };

// On CUDA, torch's allocator with a budget. On the CPU a device of its own: one mapped stretch of
// as many bytes as the budget (in whole pages; of the machine's memory where there is no limit), of
// which what is not taken is inaccessible and without memory behind it. Thread safe; a handle,
// copies share. What was taken may outlive it.
class DeviceMemory {
 public:
  DeviceMemory(c10::Device device, Budget budget);

  // Aligned to 256 bytes (a page on the CPU, so that it can be made inaccessible by itself).
  // Throws OverBudget, also where no gap is large enough. On CUDA in the order of the current
  // stream, as torch's tensors are.
  std::shared_ptr<void> take(size_t bytes, std::string_view what,
                             Stay stay = Stay::long_time) const;
  // What take() counts for so many bytes.
  size_t rounded(size_t bytes) const;
  // Whether take() would succeed now.
  bool fits(size_t bytes) const;

  const Budget& budget() const { return budget_; }
  c10::Device device() const { return device_; }
  // On the CPU: bytes of the stretch that have memory behind them now, as the kernel counts them.
  // On CUDA what is taken.
  size_t resident() const;

 private:
  struct Stretch;
  c10::Device device_;
  Budget budget_;
  std::shared_ptr<Stretch> stretch_;
};

}  // namespace lockstep::memory
