// SPDX-License-Identifier: Apache-2.0
// Sleeping on, and waking from, a word that may lie in memory shared between processes.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <ctime>

#include "lockstep/core/clock.h"

namespace lockstep::fabric {

// Returns when woken, when the word is no longer `expected`, after `timeout`, or for no reason:
// check again.
inline void futex_wait(std::atomic<uint32_t>& word, uint32_t expected, milliseconds timeout) {
  const timespec relative{timeout.count() / 1000, (timeout.count() % 1000) * 1'000'000};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, expected, &relative, nullptr,
          0);
}

inline void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace lockstep::fabric
