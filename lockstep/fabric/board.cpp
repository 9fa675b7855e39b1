// SPDX-License-Identifier: Apache-2.0
#include "lockstep/fabric/board.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/system_memory.h"
#include "lockstep/fabric/futex.h"

namespace lockstep::fabric {
namespace {

constexpr size_t kPage = 4096;

// The first thing on a board.
struct Header {
  uint64_t incarnation;
  alignas(kCacheLine) Failure failure;
};

// Where things lie: the header, the slots, the channels, the counts, then page-aligned data of each
// rank.
struct Layout {
  explicit Layout(int size, bool bare = false) {
    const auto n = static_cast<size_t>(size);
    slots = round_up(sizeof(Header), kPage);
    channels = slots + n * sizeof(Slot);
    counts = round_up(channels + n * n * sizeof(Channel), kCacheLine);
    count_stride = round_up(2 * n * sizeof(int64_t), kCacheLine);
    data = round_up(counts + 2 * n * count_stride, kPage);
    data_stride = 2 * kEagerBytes + 4 * kStagingBytes;
    mailboxes = data + n * data_stride;
    // About 4 MB for all channels together: large groups that send large ordinary tensors get
    // smaller pieces.
    mailbox_piece =
        std::clamp<size_t>(std::bit_floor((size_t{4} << 20) / (2 * n * n)), kPage, 128 << 10);
    num_headers = std::clamp<size_t>((size_t{4} << 20) / (n * n * sizeof(Signature)), 2, 16);
    total = bare ? data + n * n * num_headers * sizeof(Signature)
                 : mailboxes + 2 * n * n * mailbox_piece;
  }
  size_t slots, channels, counts, count_stride, data, data_stride, mailboxes, mailbox_piece,
      num_headers, total;
};

Header& header_of(const Segment& segment) { return *reinterpret_cast<Header*>(segment.data()); }

}  // namespace

Board::Board(Segment segment, int size) : segment_(std::move(segment)), size_(size) {}

std::shared_ptr<Board> Board::create(int size, bool shared, uint64_t incarnation, bool bare) {
  const size_t bytes = Layout(size, bare).total;
  Segment segment =
      shared ? Segment::create(bytes, "lockstep-board") : Segment::create_private(bytes);
  header_of(segment).incarnation = incarnation;
  return std::shared_ptr<Board>(new Board(std::move(segment), size));
}

std::shared_ptr<Board> Board::open(const SegmentHandle& handle, int size, uint64_t incarnation) {
  check(handle.bytes == Layout(size).total || handle.bytes == Layout(size, true).total,
        "a board's size must follow from its number of ranks");
  Segment segment = Segment::open(handle);
  const uint64_t found = header_of(segment).incarnation;
  if (found != incarnation) {
    throw CommError(
        format("the shared memory of process {} belongs to incarnation {:016x} of the job, this "
               "rank to {:016x}; all ranks must start communication equally often",
               handle.pid, found, incarnation));
  }
  return std::shared_ptr<Board>(new Board(std::move(segment), size));
}

void Board::keep(std::shared_ptr<const void> memory) {
  const std::lock_guard lock(mutex_);
  kept_.push_back(std::move(memory));
}

Slot& Board::slot(int rank) const {
  return reinterpret_cast<Slot*>(segment_.data() + Layout(size_).slots)[rank];
}

Channel& Board::channel(int from, int to) const {
  return reinterpret_cast<Channel*>(segment_.data() + Layout(size_).channels)[from * size_ + to];
}

Failure& Board::failure() const { return header_of(segment_).failure; }

int64_t* Board::counts(int rank, uint64_t sequence) const {
  const Layout layout(size_);
  return reinterpret_cast<int64_t*>(segment_.data() + layout.counts +
                                    (2 * static_cast<size_t>(rank) + sequence % 2) *
                                        layout.count_stride);
}

std::byte* Board::eager(int rank, uint64_t sequence) const {
  const Layout layout(size_);
  return segment_.data() + layout.data + static_cast<size_t>(rank) * layout.data_stride +
         sequence % 2 * kEagerBytes;
}

std::byte* Board::staging(int rank, int piece) const {
  const Layout layout(size_);
  return segment_.data() + layout.data + static_cast<size_t>(rank) * layout.data_stride +
         2 * kEagerBytes + static_cast<size_t>(piece) * kStagingBytes;
}

std::byte* Board::mailbox(int from, int to, uint64_t piece) const {
  const Layout layout(size_);
  const size_t channel =
      static_cast<size_t>(from) * static_cast<size_t>(size_) + static_cast<size_t>(to);
  return segment_.data() + layout.mailboxes + (2 * channel + piece % 2) * layout.mailbox_piece;
}

Signature& Board::header(int from, int to, uint64_t number) const {
  const Layout layout(size_, true);
  const auto channel =
      static_cast<size_t>(from) * static_cast<size_t>(size_) + static_cast<size_t>(to);
  return reinterpret_cast<Signature*>(
      segment_.data() + layout.data)[channel * layout.num_headers + number % layout.num_headers];
}

uint64_t Board::num_headers() const { return Layout(size_, true).num_headers; }

size_t Board::mailbox_bytes() const { return Layout(size_).mailbox_piece; }

void Board::ring(int rank) const {
  // Pairs with Engine::sleep: it says that it sleeps, then looks again. Both sides sequentially
  // consistent, so either the sleeper sees the change or we see the sleeper.
  Slot& target = slot(rank);
  if (target.sleeping.load(std::memory_order_seq_cst) == 0) return;
  target.doorbell.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(target.doorbell);
}

void Board::ring_all() const {
  for (int rank = 0; rank < size_; ++rank) ring(rank);
}

void Board::fail(Failure::Kind kind, int rank, const std::string& message) const {
  Failure& record = failure();
  uint32_t expected = Failure::none;
  if (!record.stage.compare_exchange_strong(expected, Failure::writing)) return;
  record.kind = kind;
  record.rank = rank;
  record.message[message.copy(record.message, sizeof(record.message) - 1)] = '\0';
  record.stage.store(Failure::written, std::memory_order_seq_cst);
  ring_all();
}

}  // namespace lockstep::fabric
