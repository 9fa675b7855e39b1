#include "lockstep/fabric/seat.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::fabric {

Seat::Seat(std::shared_ptr<Board> board, int rank, std::string group_name, std::shared_ptr<SharedHeap> heap,
           std::shared_ptr<PeerHeaps> peer_heaps)
    : board_(std::move(board)),
      rank_(rank),
      size_(board_->size()),
      group_name_(std::move(group_name)),
      heap_(std::move(heap)),
      peer_heaps_(std::move(peer_heaps)) {
  Slot& mine = board_->slot(rank_);
  mine.pid = getpid();
  if (heap_) mine.heap = heap_->table();
  mine.state.store(SlotState::joined, std::memory_order_release);
}

void Seat::enter(const Operation& operation) {
  ++sequence_;
  Posting& mine = board_->slot(rank_).postings[sequence_ % 2];
  mine.signature = signature_of(operation);
  mine.sequence = sequence_;
  mine.eager = operation.input.size() <= kEagerBytes;
  if (mine.eager && !operation.input.empty()) {
    std::memcpy(board_->eager(rank_, sequence_), operation.input.data(), operation.input.size());
  }
  mine.input = locate(operation.input.data(), operation.input.size());
  mine.output = locate(operation.output.data(), operation.output.size());
  int64_t* counts = board_->counts(rank_, sequence_);
  if (!operation.send_counts.empty()) std::memcpy(counts, operation.send_counts.data(), operation.send_counts.size() * sizeof(int64_t));
  if (!operation.recv_counts.empty()) {
    std::memcpy(counts + size_, operation.recv_counts.data(), operation.recv_counts.size() * sizeof(int64_t));
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
  return {reinterpret_cast<const std::byte*>(&board_->slot(0).progress), sizeof(Slot), 0, size_, progress_};
}

void Seat::compare() const {
  const Signature& expected = posting(0).signature;
  bool equal = true;
  for (int peer = 1; peer < size_; ++peer) equal = equal && posting(peer).signature == expected;
  if (!equal) {
    std::vector<std::pair<std::string, std::vector<int>>> sides;  // what was called, by whom
    for (int peer = 0; peer < size_; ++peer) {
      const Signature& signature = posting(peer).signature;
      std::string text = describe(signature);
      if (signature.kind == OpKind::all_gather || signature.kind == OpKind::reduce_scatter) {
        const int64_t* counts = board_->counts(peer, sequence_) + (signature.kind == OpKind::all_gather ? size_ : 0);
        text += format(" in blocks of {}", join(std::vector<int64_t>(counts, counts + size_)));
      }
      const auto side = std::find_if(sides.begin(), sides.end(), [&](const auto& s) { return s.first == text; });
      if (side == sides.end()) {
        sides.push_back({text, {peer}});
      } else {
        side->second.push_back(peer);
      }
    }
    std::string message = format("ranks of group '{}' do not agree on operation #{}:", group_name_, sequence_);
    const char* separator = " ";
    for (const auto& [text, ranks] : sides) {
      message += format("{}rank{} {} called {}", separator, ranks.size() > 1 ? "s" : "", join(ranks), text);
      separator = "; ";
    }
    throw MismatchError(message);
  }
  if (expected.kind != OpKind::all_to_all) return;
  for (int from = 0; from < size_; ++from) {
    for (int to = 0; to < size_; ++to) {
      const int64_t sent = board_->counts(from, sequence_)[to], awaited = board_->counts(to, sequence_)[size_ + from];
      if (sent == awaited) continue;
      throw MismatchError(format("ranks of group '{}' do not agree on operation #{}, {}: rank {} sends {} elements to rank {}, "
                                 "which expects {}", group_name_, sequence_, describe(expected), from, sent, to, awaited));
    }
  }
}

Location Seat::locate(const void* data, size_t bytes) const {
  if (heap_ == nullptr || bytes == 0) return {Location::address, 0, 0, reinterpret_cast<uint64_t>(data)};
  return heap_->find(data, bytes);
}

std::byte* Seat::reach(int rank, const Location& location) const {
  if (location.kind == Location::address) return reinterpret_cast<std::byte*>(location.offset);
  return peer_heaps_->resolve(board_->slot(rank).heap, location);
}

void Seat::show_activity(OpKind kind, uint64_t sequence, bool running) const {
  board_->slot(rank_).activity.store(Activity{kind, running, sequence}.pack(), std::memory_order_relaxed);
}

}  // namespace lockstep::fabric
