// SPDX-License-Identifier: Apache-2.0
#include "lockstep/fabric/seat.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "lockstep/fabric/agreement.h"

namespace lockstep::fabric {

Seat::Seat(std::shared_ptr<Board> board, int rank, std::string group_name,
           std::shared_ptr<SharedHeap> heap, std::shared_ptr<PeerHeaps> peer_heaps)
    : board_(std::move(board)),
      rank_(rank),
      size_(board_->size()),
      group_name_(std::move(group_name)),
      heap_(std::move(heap)),
      peer_heaps_(std::move(peer_heaps)) {
  std::random_device random;
  word_ = std::make_unique<const uint64_t>(uint64_t{random()} << 32 | random());
  Slot& mine = board_->slot(rank_);
  mine.pid = getpid();
  mine.word = *word_;
  mine.address_of_word = reinterpret_cast<uint64_t>(word_.get());
  if (heap_) mine.heap = heap_->table();
  mine.state.store(SlotState::joined, std::memory_order_release);
}

void Seat::enter(const Operation& operation) {
  ++sequence_;
  Posting& mine = board_->slot(rank_).postings[sequence_ % 2];
  mine.signature = signature_of(operation);
  mine.sequence = sequence_;
  mine.reads_peers = reads_peers_;
  mine.input = locate(operation.input.data(), operation.input.size());
  mine.output = locate(operation.output.data(), operation.output.size());
  // Eager data is read by every peer: the more there are, the sooner sharing the work pays. What
  // peers can read where it is gains from being copied only while it is tiny.
  const size_t limit = mine.input.kind == Location::unreachable
                           ? kEagerBytes / static_cast<size_t>(std::max(1, size_ - 1))
                           : kEagerBytes / 32;
  mine.eager = operation.input.size() <= limit;
  if (mine.eager && !operation.input.empty()) {
    std::memcpy(board_->eager(rank_, sequence_), operation.input.data(), operation.input.size());
  }
  int64_t* counts = board_->counts(rank_, sequence_);
  if (!operation.send_counts.empty())
    std::memcpy(counts, operation.send_counts.data(),
                operation.send_counts.size() * sizeof(int64_t));
  if (!operation.recv_counts.empty()) {
    std::memcpy(counts + size_, operation.recv_counts.data(),
                operation.recv_counts.size() * sizeof(int64_t));
  }
  show_activity(operation.kind, sequence_, true);
  post();
}

void Seat::post() {
  board_->slot(rank_).progress.store(++progress_, std::memory_order_seq_cst);
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_) board_->ring(peer);
  }
}

Wait Seat::everyone() const {
  return {reinterpret_cast<const std::byte*>(&board_->slot(0).progress), sizeof(Slot), 0, size_,
          progress_};
}

Wait Seat::next_phase_of(int rank) const {
  return {reinterpret_cast<const std::byte*>(&board_->slot(0).progress), sizeof(Slot), rank,
          rank + 1, progress_ + 1};
}

void Seat::look_at_peers() {
  if (has_looked_ || heap_ == nullptr) return;
  has_looked_ = true;
  reads_peers_ = true;
  for (int peer = 0; peer < size_ && reads_peers_; ++peer) {
    const Slot& slot = board_->slot(peer);
    uint64_t word = 0;
    reads_peers_ = read(peer, {Location::unreachable, 0, 0, slot.address_of_word}, 0,
                        reinterpret_cast<std::byte*>(&word), sizeof(word)) &&
                   word == slot.word;
  }
}

bool Seat::read(int rank, const Location& location, size_t offset, std::byte* to,
                size_t bytes) const {
  const auto pid = static_cast<pid_t>(board_->slot(rank).pid);
  while (bytes > 0) {
    const iovec mine{to, bytes};
    const iovec theirs{reinterpret_cast<void*>(location.offset + offset), bytes};
    const ssize_t copied = process_vm_readv(pid, &mine, 1, &theirs, 1, 0);
    if (copied <= 0) return false;
    to += copied;
    offset += static_cast<size_t>(copied);
    bytes -= static_cast<size_t>(copied);
  }
  return true;
}

void Seat::compare() const {
  const Signature& first = posting(0).signature;
  bool equal = first.kind != OpKind::all_to_all;  // its blocks have to be looked at
  for (int peer = 1; peer < size_ && equal; ++peer) equal = posting(peer).signature == first;
  if (equal) return;
  check_agreement({group_name_, sequence_, size_,
                   [this](int rank) -> const Signature& { return posting(rank).signature; },
                   [this](int rank) { return board_->counts(rank, sequence_); }});
}

Location Seat::locate(const void* data, size_t bytes) const {
  if (heap_ == nullptr || bytes == 0)
    return {Location::address, 0, 0, reinterpret_cast<uint64_t>(data)};
  Location location = heap_->find(data, bytes);
  if (location.kind == Location::unreachable) location.offset = reinterpret_cast<uint64_t>(data);
  return location;
}

std::byte* Seat::reach(int rank, const Location& location) const {
  if (location.kind == Location::address) return reinterpret_cast<std::byte*>(location.offset);
  return peer_heaps_->resolve(board_->slot(rank).heap, location);
}

Location Seat::lend(const void* data, size_t bytes) const {
  const Location location = locate(data, bytes);
  if (location.kind == Location::block) heap_->lend(data, size_);
  return location;
}

std::shared_ptr<const std::byte> Seat::borrow(int rank, const Location& location) const {
  const SegmentHandle table = board_->slot(rank).heap;
  const std::byte* const data = reach(rank, location);
  if (location.kind == Location::address) return {std::shared_ptr<void>(), data};
  return {data, [peers = peer_heaps_, table, location](const std::byte*) {
            peers->give_back(table, location);
          }};
}

void Seat::retire(const Operation& operation) const {
  if (heap_ == nullptr) return;
  heap_->lend(operation.input.data(), 1);  // and it never comes back
  heap_->lend(operation.output.data(), 1);
}

void Seat::show_activity(OpKind kind, uint64_t sequence, bool running) const {
  board_->slot(rank_).activity.store(Activity{kind, running, sequence}.pack(),
                                     std::memory_order_relaxed);
}

}  // namespace lockstep::fabric
