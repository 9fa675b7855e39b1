// SPDX-License-Identifier: Apache-2.0
// The board: memory that all ranks of a group see, where each has a slot to post what it does and
// to leave data.
//
// Words used here and in the algorithms:
//   slot       what one rank posts: which operation it is in, where its data lies, how far it is
//   progress   a counter in each slot; a rank adds one for every phase it finishes. All ranks run
//   the same phases in the
//              same order, so "every slot has reached p" is a barrier
//   eager      a small buffer in each slot for data that travels with the posting itself
//   staging    larger buffers for data that lies where peers cannot reach it, moved in pieces
//   channel    the same for one sender and one receiver
//   doorbell   a futex word in each slot; who finds its owner asleep rings it
// Nothing on the board is ever locked, so a rank that dies leaves it usable.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "lockstep/fabric/heap.h"
#include "lockstep/fabric/operation.h"
#include "lockstep/fabric/segment.h"

namespace lockstep::fabric {

constexpr size_t kCacheLine = 64;
constexpr size_t kEagerBytes = 64 << 10;
constexpr size_t kStagingBytes =
    512 << 10;  // one of four pieces a rank stages in; all ranks' fit a second-level cache

enum class SlotState : uint32_t { empty, joined, left };

// What a rank says of the collective it has entered.
struct Posting {
  Signature signature;
  uint64_t sequence;
  bool eager;        // the input lies in the eager buffer
  bool reads_peers;  // this rank can read the memory of every other process of the group
  Location input, output;
};

// What a rank is doing, for messages about late ranks: readable at any time.
struct Activity {
  OpKind kind = OpKind::barrier;
  bool running = false;
  uint64_t sequence = 0;  // 0: nothing yet

  uint64_t pack() const {
    return sequence << 16 | static_cast<uint64_t>(kind) << 8 | static_cast<uint64_t>(running);
  }
  static Activity unpack(uint64_t word) {
    return {static_cast<OpKind>(word >> 8 & 0xff), (word & 0xff) != 0, word >> 16};
  }
};

struct alignas(2 * kCacheLine) Slot {
  std::atomic<uint64_t> progress;
  alignas(2 * kCacheLine) std::atomic<uint32_t> doorbell;
  std::atomic<uint32_t> sleeping;
  std::atomic<uint64_t> activity;
  std::atomic<SlotState> state;
  int64_t pid;
  // A random word in the rank's own memory: who can read it there can read the rest too.
  uint64_t word, address_of_word;
  SegmentHandle heap;
  alignas(kCacheLine) Posting postings[2];  // by parity of the sequence number
};

struct alignas(kCacheLine) Channel {
  std::atomic<uint64_t> sent;
  alignas(kCacheLine) std::atomic<uint64_t> received;
  alignas(kCacheLine) Signature signature;  // of the message in flight
  Location data;                            // unreachable: it comes through the mailbox
};

// The first failure of the group; every rank ends with it.
struct Failure {
  enum Stage : uint32_t { none, writing, written };
  enum Kind : uint32_t { mismatch, timeout, peer_lost, other };
  std::atomic<uint32_t> stage;
  uint32_t kind;
  int32_t rank;  // the rank that is to blame
  char message[1000];
};

class Board {
 public:
  // Shared with other processes, or private to the threads of this one. `incarnation` says which
  // start of the job it belongs to. A bare one has no room for data: operations on it are
  // announced, or have none.
  static std::shared_ptr<Board> create(int size, bool shared, uint64_t incarnation = 0,
                                       bool bare = false);
  // Throws CommError where the memory is of another incarnation.
  static std::shared_ptr<Board> open(const SegmentHandle& handle, int size, uint64_t incarnation);

  int size() const { return size_; }
  const SegmentHandle& handle() const { return segment_.handle(); }

  Slot& slot(int rank) const;
  Channel& channel(int from, int to) const;
  Failure& failure() const;
  // Sequence parity chooses between two copies: a rank can be one operation ahead of another, not
  // two.
  std::byte* eager(int rank, uint64_t sequence) const;
  int64_t* counts(int rank,
                  uint64_t sequence) const;       // size() send counts, then size() receive counts
  std::byte* staging(int rank, int piece) const;  // four pieces
  // Two pieces for the messages of a channel. On the board, so that a message outlives a sender
  // that has left.
  std::byte* mailbox(int from, int to, uint64_t piece) const;
  size_t mailbox_bytes() const;  // of one piece
  // Headers of messages that are announced, the last few of a channel. A bare board has them.
  Signature& header(int from, int to, uint64_t number) const;
  uint64_t num_headers() const;

  // Wakes the ranks that sleep. Call after the change that they wait for.
  void ring(int rank) const;
  void ring_all() const;

  // Keeps memory as long as the board. An operation that ends early on one rank may still be under
  // way on others, and those of ranks that are threads write to it.
  void keep(std::shared_ptr<const void> memory);

  // Records the failure unless there is one; wakes everybody.
  void fail(Failure::Kind kind, int rank, const std::string& message) const;

 private:
  Board(Segment segment, int size);

  Segment segment_;
  int size_;
  std::mutex mutex_;  // threads only, never another process's
  std::vector<std::shared_ptr<const void>> kept_;
};

}  // namespace lockstep::fabric
