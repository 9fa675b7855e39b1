// SPDX-License-Identifier: Apache-2.0
// Memory that one rank allocates and other processes can reach: the substance of symmetric memory.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "lockstep/fabric/segment.h"

namespace lockstep::fabric {

// Where bytes lie, as told to another rank. Default: nowhere a peer can reach.
struct Location {
  enum Kind : uint32_t { unreachable, address, block };
  uint32_t kind = unreachable;
  uint32_t entry = 0;  // block: index in the owner's table
  uint64_t id = 0;     // block: tells a reused entry from the one that was meant
  // block: bytes from its start; otherwise the address in the owner's process
  uint64_t offset = 0;
};

// The blocks of one rank, laid out in few segments: descriptors and mappings do not grow with the
// number of blocks. A table in shared memory tells peers where each block is. Thread safe. Blocks
// outlive the heap object.
class SharedHeap {
 public:
  SharedHeap();

  const SegmentHandle& table() const;
  // Zeroed memory, aligned to 256 bytes, and to a page from one page on; it goes back to the system
  // when the block is freed. Throws when there is not enough.
  std::shared_ptr<std::byte> allocate(size_t bytes);
  // The location of [data, data + bytes) if one block holds all of it.
  Location find(const void* data, size_t bytes) const;
  // The block that holds `data`, if any, keeps its memory, freed or not, until `peers` calls of
  // PeerHeaps::give_back for it.
  void lend(const void* data, int peers);

 private:
  struct Books;
  std::shared_ptr<Books> books_;
};

// Other ranks' segments, mapped when first needed. Thread safe.
class PeerHeaps {
 public:
  // Throws std::logic_error where the owner has freed the block.
  std::byte* resolve(const SegmentHandle& table, const Location& location);
  // For a block that was lent to this rank and resolved.
  void give_back(const SegmentHandle& table, const Location& location);

 private:
  struct PeerTable {
    Segment table;
    std::map<uint32_t, Segment> mapped;  // by index in the table
  };
  std::mutex mutex_;
  std::map<std::pair<int64_t, uint64_t>, PeerTable> peers_;  // by pid and inode of the table
};

}  // namespace lockstep::fabric
