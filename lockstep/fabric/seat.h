// SPDX-License-Identifier: Apache-2.0
// One rank's place at a board: posting, looking at the others, and reaching their memory.
#pragma once

#include <memory>
#include <string>

#include "lockstep/fabric/board.h"
#include "lockstep/fabric/heap.h"
#include "lockstep/fabric/task.h"

namespace lockstep::fabric {

class Seat {
 public:
  // Without a heap, ranks are threads of one process and all memory is reachable.
  Seat(std::shared_ptr<Board> board, int rank, std::string group_name,
       std::shared_ptr<SharedHeap> heap, std::shared_ptr<PeerHeaps> peer_heaps);

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& group_name() const { return group_name_; }
  Board& board() const { return *board_; }
  uint64_t sequence() const { return sequence_; }

  // The next collective is one that users did not call: it gets the number 0, and theirs begin
  // at 1.
  void expect_joining() { sequence_ = UINT64_MAX; }
  // Enters the next collective: posts what it is and where its data lies, and finishes the first
  // phase.
  void enter(const Operation& operation);
  // Finishes a phase: what this rank wrote before is visible to a rank that waits for everyone().
  void post();
  // All ranks have finished as many phases as this one.
  Wait everyone() const;
  // One rank has finished one phase more than this one.
  Wait next_phase_of(int rank) const;
  // Throws MismatchError, the same on every rank, unless all have entered the same collective.
  void compare() const;
  const Posting& posting(int rank) const { return board_->slot(rank).postings[sequence_ % 2]; }

  // Looks once, when all ranks are there, whether this one can read the memory of the others
  // through the kernel; they learn it with its next posting.
  void look_at_peers();
  // Copies from unreachable memory of another process. False if the kernel refuses, as it does once
  // the process has died.
  bool read(int rank, const Location& location, size_t offset, std::byte* to, size_t bytes) const;

  // How peers find memory of this rank, and how this rank finds theirs.
  Location locate(const void* data, size_t bytes) const;
  std::byte* reach(int rank, const Location& location) const;
  // The same for memory that is used outside operations: it stays, freed or not, until every member
  // has borrowed it once and dropped what it got.
  Location lend(const void* data, size_t bytes) const;
  std::shared_ptr<const std::byte> borrow(int rank, const Location& location) const;
  // This rank gave up an operation that others may still be in: no other block gets its memory.
  void retire(const Operation& operation) const;

  // What the others see of this rank: see Activity.
  void show_activity(OpKind kind, uint64_t sequence, bool running) const;

 private:
  std::shared_ptr<Board> board_;
  int rank_, size_;
  std::string group_name_;
  std::shared_ptr<SharedHeap> heap_;
  std::shared_ptr<PeerHeaps> peer_heaps_;
  uint64_t sequence_ = 0;  // of the collective entered last
  uint64_t progress_ = 0;  // phases finished
  std::unique_ptr<const uint64_t> word_;
  bool has_looked_ = false, reads_peers_ = false;
};

}  // namespace lockstep::fabric
