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
  uint64_t offset =
      0;  // block: bytes from its start; address: the address itself, for ranks of one process
};

// The blocks of one rank. Each is a segment of its own; a table in shared memory tells peers how to
// open them. Thread safe. Blocks outlive the heap object.
class SharedHeap {
 public:
  SharedHeap();

  const SegmentHandle& table() const;
  // Uninitialised for the caller's purposes (in fact zero). Throws when the memory cannot be had.
  std::shared_ptr<std::byte> allocate(size_t bytes);
  // The location of [data, data + bytes) if one block holds all of it.
  Location find(const void* data, size_t bytes) const;

 private:
  struct Books;
  std::shared_ptr<Books> books_;
};

// Other ranks' blocks, mapped when first needed and unmapped once their owner has freed them.
// Thread safe.
class PeerHeaps {
 public:
  std::byte* resolve(const SegmentHandle& table, const Location& location);

 private:
  struct PeerTable {
    Segment table;
    std::map<uint32_t, std::pair<uint64_t, Segment>> mapped;  // entry -> id, memory
  };
  std::mutex mutex_;
  std::map<std::pair<int64_t, uint64_t>, PeerTable> peers_;  // by pid and inode of the table
};

}  // namespace lockstep::fabric
