// SPDX-License-Identifier: Apache-2.0
// A loop on torch's threads. Private: not installed.
#pragma once

#include <cstdint>
#include <functional>

namespace lockstep::memory {

// Calls body(begin, end) for parts of [0, count) of at least `grain`, on torch's threads, and
// returns when all have ended. at::parallel_for is a header and silently serial in code that is not
// compiled with libtorch's own OpenMP. `body` must not touch tensors, only their memory.
void parallel_for(int64_t count, int64_t grain,
                  const std::function<void(int64_t begin, int64_t end)>& body);

}  // namespace lockstep::memory
