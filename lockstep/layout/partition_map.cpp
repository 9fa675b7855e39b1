// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <set>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/require.h"
#include "lockstep/layout/placement.h"

namespace lockstep::layout {
namespace {

constexpr Requirement require_partition("partition_map");

}  // namespace

PartitionMap::PartitionMap(int64_t partitions, int world) : partitions_(partitions), world_(world) {
  require_partition(partitions >= 0, format("{} partitions, must be at least 0", partitions));
  require_partition(world >= 1, format("world size {}, must be at least 1", world));
}

int PartitionMap::owner(int64_t partition) const {
  check_partition(partition);
  return static_cast<int>(partition % world_);
}

bool PartitionMap::owns(int rank, int64_t partition) const {
  check_rank(rank);
  return owner(partition) == rank;
}

int64_t PartitionMap::local_index(int64_t partition) const {
  check_partition(partition);
  return partition / world_;
}

int64_t PartitionMap::global_index(int rank, int64_t local) const {
  const int64_t count = owned_count(rank);
  require_partition(
      local >= 0 && local < count,
      format("rank {}: local index {}, must be at least 0 and below {}", rank, local, count));
  return local * world_ + rank;
}

int64_t PartitionMap::owned_count(int rank) const {
  check_rank(rank);
  return partitions_ / world_ + (rank < partitions_ % world_ ? 1 : 0);
}

std::vector<int64_t> PartitionMap::owned(int rank) const {
  std::vector<int64_t> indices(static_cast<size_t>(owned_count(rank)));
  for (size_t i = 0; i < indices.size(); ++i)
    indices[i] = global_index(rank, static_cast<int64_t>(i));
  return indices;
}

std::vector<int> PartitionMap::group_of(std::span<const int64_t> partitions) const {
  std::set<int> owners;
  for (const int64_t partition : partitions) owners.insert(owner(partition));
  return {owners.begin(), owners.end()};
}

void PartitionMap::check_rank(int rank) const {
  require_partition(
      rank >= 0 && rank < world_,
      format("rank {}, must be at least 0 and below the world size {}", rank, world_));
}

void PartitionMap::check_partition(int64_t partition) const {
  require_partition(
      partition >= 0 && partition < partitions_,
      format("partition {}, must be at least 0 and below {}", partition, partitions_));
}

}  // namespace lockstep::layout
