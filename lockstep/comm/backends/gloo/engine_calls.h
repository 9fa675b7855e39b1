// SPDX-License-Identifier: Apache-2.0
// The calls of c10d that a collective becomes. Gloo has no uneven all_gather: each block is
// broadcast. reduce_scatter is an all_to_all and a sum in fixed order. Private to gloo/.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "lockstep/comm/backends/gloo/process_group.h"
#include "lockstep/fabric/operation.h"

namespace lockstep::comm::gloo {

using WorkHandle = c10::intrusive_ptr<c10d::Work>;

// What runs, what it reads and writes, and what is left to do when all has ended.
struct Started {
  std::vector<WorkHandle> works;
  std::shared_ptr<const void> memory;
  std::function<void()> finish;
};
Started start(Engine& engine, const fabric::Operation& operation,
              std::shared_ptr<const void> memory);

// Later than our own deadline, which says more.
milliseconds engine_timeout(const fabric::Operation& operation);

at::Tensor bytes_tensor(std::span<const std::byte> bytes);

}  // namespace lockstep::comm::gloo
