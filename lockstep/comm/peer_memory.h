// Reading the memory of other ranks without their help.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/core/torch_fwd.h"
#include "lockstep/fabric/heap.h"

namespace lockstep::comm {

// A part of every rank's memory, where all of it can be reached: symmetric memory under shm, any
// under thread. Whoever reads must know by other means that the owner does not write.
class PeerMemory {
 public:
  // Collective: every rank names one contiguous CPU tensor, of any size. Nothing, on all ranks,
  // where the backend has no shared memory.
  static std::optional<PeerMemory> open(const at::Tensor& mine, const Group& group);

  // Where this rank finds the tensor of `rank`. Throws PeerLost if the owner has freed it; under
  // thread it stays as long as anybody has this. Thread safe.
  const std::byte* of(int rank) const;

 private:
  PeerMemory(Group group, std::vector<fabric::Location> locations, std::shared_ptr<void> held)
      : group_(std::move(group)), locations_(std::move(locations)), held_(std::move(held)) {}

  Group group_;
  std::vector<fabric::Location> locations_;
  std::shared_ptr<void> held_;  // the tensors of all ranks, where they are threads
};

}  // namespace lockstep::comm
