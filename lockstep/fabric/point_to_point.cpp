// SPDX-License-Identifier: Apache-2.0
// A message is a header (what it is, where it lies) and its data. Large data in memory that the
// receiver can reach is read from there; the sender waits until that is done. All else goes through
// the channel's mailbox in pieces, two at a time. Both ends count pieces: `sent` by the sender,
// `received` by the receiver.
#include "lockstep/fabric/point_to_point.h"

#include <algorithm>

#include "lockstep/fabric/agreement.h"
#include "lockstep/fabric/copy.h"

namespace lockstep::fabric {
namespace {

constexpr size_t kDirectBytes =
    128 << 10;  // below, copying through the mailbox is cheaper than waiting for the receiver

Wait reached(const std::atomic<uint64_t>& counter, int rank, uint64_t target) {
  // One counter, presented as that of `rank` so that a message about the wait can name it.
  return {reinterpret_cast<const std::byte*>(&counter), 0, rank, rank + 1, target};
}

void count_up(std::atomic<uint64_t>& counter, const Seat& seat, int peer) {
  counter.store(counter.load(std::memory_order_relaxed) + 1, std::memory_order_seq_cst);
  seat.board().ring(peer);
}

}  // namespace

Task announce_send(Seat& seat, const Operation& operation, uint64_t& pieces) {
  const int peer = operation.root;
  const Board& board = seat.board();
  Channel& channel = board.channel(seat.rank(), peer);
  if (pieces >= board.num_headers())
    co_await reached(channel.received, peer, pieces + 1 - board.num_headers());
  board.header(seat.rank(), peer, pieces) = signature_of(operation);
  ++pieces;
  count_up(channel.sent, seat, peer);
}

Task announce_recv(Seat& seat, const Operation& operation, uint64_t& pieces) {
  const int peer = operation.root;
  const Board& board = seat.board();
  Channel& channel = board.channel(peer, seat.rank());
  co_await reached(channel.sent, peer, pieces + 1);
  check_message(seat.group_name(), seat.rank(), signature_of(operation),
                board.header(peer, seat.rank(), pieces));
  ++pieces;
  count_up(channel.received, seat, peer);
}

Task run_send(Seat& seat, const Operation& operation, uint64_t& pieces) {
  const int peer = operation.root;
  const Board& board = seat.board();
  Channel& channel = board.channel(seat.rank(), peer);
  const auto data = operation.input;
  const Location place =
      data.size() > kDirectBytes ? seat.locate(data.data(), data.size()) : Location{};

  co_await reached(channel.received, peer,
                   pieces);  // the message before this one has left the channel
  channel.signature = signature_of(operation);
  channel.data = place;
  if (place.kind != Location::unreachable) {
    ++pieces;
    count_up(channel.sent, seat, peer);
    co_await reached(channel.received, peer, pieces);
    co_return;
  }
  const size_t room = board.mailbox_bytes();
  size_t begin = 0;
  do {  // an empty message is one empty piece
    if (pieces >= 2) co_await reached(channel.received, peer, pieces - 1);
    const size_t size = std::min(room, data.size() - begin);
    copy_bytes(board.mailbox(seat.rank(), peer, pieces), data.data() + begin, size);
    begin += size;
    ++pieces;
    count_up(channel.sent, seat, peer);
  } while (begin < data.size());
}

Task run_recv(Seat& seat, const Operation& operation, uint64_t& pieces) {
  const int peer = operation.root;
  const Board& board = seat.board();
  Channel& channel = board.channel(peer, seat.rank());
  const auto data = operation.output;

  co_await reached(channel.sent, peer, pieces + 1);
  check_message(seat.group_name(), seat.rank(), signature_of(operation), channel.signature);
  if (channel.data.kind != Location::unreachable) {
    copy_result(data.data(), seat.reach(peer, channel.data), data.size());
    ++pieces;
    count_up(channel.received, seat, peer);
    co_return;
  }
  const size_t room = board.mailbox_bytes();
  size_t begin = 0;
  do {
    co_await reached(channel.sent, peer, pieces + 1);
    const size_t size = std::min(room, data.size() - begin);
    copy_bytes(data.data() + begin, board.mailbox(peer, seat.rank(), pieces), size);
    begin += size;
    ++pieces;
    count_up(channel.received, seat, peer);
  } while (begin < data.size());
}

}  // namespace lockstep::fabric
