// SPDX-License-Identifier: Apache-2.0
// Reading the memory of other ranks without their help.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/core/torch_fwd.h"

namespace lockstep::comm {

// A part of every rank's memory, where all of it can be reached: symmetric memory under shm, any
// under thread. A reader must know by other means that the owner does not write.
class PeerMemory {
 public:
  // Collective: every rank names one contiguous CPU tensor, of any size. Nothing, on all ranks,
  // where the backend has no shared memory.
  static std::optional<PeerMemory> open(const at::Tensor& mine, const Group& group);

  // Where this rank finds the tensor of `rank`. It stays as long as any rank has this, also where
  // its owner has freed it. Thread safe.
  const std::byte* of(int rank) const { return memory_[static_cast<size_t>(rank)].get(); }

 private:
  PeerMemory(std::vector<std::shared_ptr<const std::byte>> memory, std::shared_ptr<void> held)
      : memory_(std::move(memory)), held_(std::move(held)) {}

  std::vector<std::shared_ptr<const std::byte>> memory_;  // of each rank
  std::shared_ptr<void> held_;  // the tensors of all ranks, where they are threads
};

}  // namespace lockstep::comm
