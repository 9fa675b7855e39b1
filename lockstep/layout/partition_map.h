// SPDX-License-Identifier: Apache-2.0
// Which rank owns which of a list of partitions, parameters dealt out one after the other.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace lockstep::layout {

// Partition i belongs to rank i % world. A value; throws ConfigError, with both numbers, for what
// is outside.
class PartitionMap {
 public:
  PartitionMap(int64_t partitions, int world);

  int64_t partitions() const { return partitions_; }
  int world() const { return world_; }

  int owner(int64_t partition) const;
  bool owns(int rank, int64_t partition) const;
  // The how-manieth of its owner's, and back.
  int64_t local_index(int64_t partition) const;
  int64_t global_index(int rank, int64_t local) const;

  int64_t owned_count(int rank) const;
  std::vector<int64_t> owned(int rank) const;  // ascending

  // Ranks that own some of the partitions, ascending, each once: those that must take part where
  // all of these are needed.
  std::vector<int> group_of(std::span<const int64_t> partitions) const;

 private:
  void check_rank(int rank) const;
  void check_partition(int64_t partition) const;

  int64_t partitions_;
  int world_;
};

}  // namespace lockstep::layout
