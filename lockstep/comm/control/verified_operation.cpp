// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/control/verified_operation.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "lockstep/comm/blocks.h"
#include "lockstep/comm/control/job_roster.h"
#include "lockstep/comm/message_fault.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/fabric/reduce.h"
#include "lockstep/io/crc32c.h"

namespace lockstep::comm::detail {
namespace {

using fabric::Operation;
using fabric::OpKind;

// A reduction of up to so many bytes, of all ranks together, is one step: every rank gets all.
constexpr size_t kOneStepBytes = 64 << 10;

// Of each part at a time; all of them shall stay in the cache. A multiple of every dtype's size.
constexpr size_t kChunkBytes = 32 << 10;

// What this rank sends to each rank, and receives from each; its own block counts as both.
std::vector<std::span<const std::byte>> sent_blocks(const Operation& operation, int rank,
                                                    size_t size) {
  std::vector<std::span<const std::byte>> blocks(size);
  switch (operation.kind) {
    case OpKind::all_gather:
      return {size, operation.input};
    case OpKind::all_to_all:
      return cut(operation.input, operation.send_counts, operation.dtype);
    case OpKind::broadcast:
      if (rank == operation.root) return {size, operation.output};
      return blocks;
    case OpKind::gather:
      blocks[static_cast<size_t>(operation.root)] = operation.input;
      return blocks;
    case OpKind::scatter:
      if (rank == operation.root)
        return cut(operation.input, std::vector<int64_t>(size, operation.count), operation.dtype);
      return blocks;
    default:  // barrier
      return blocks;
  }
}

std::vector<std::span<std::byte>> received_blocks(const Operation& operation, int rank,
                                                  size_t size) {
  std::vector<std::span<std::byte>> blocks(size);
  switch (operation.kind) {
    case OpKind::all_gather:
    case OpKind::all_to_all:
      return cut(operation.output, operation.recv_counts, operation.dtype);
    case OpKind::gather:
      if (rank == operation.root)
        return cut(operation.output, std::vector<int64_t>(size, operation.count), operation.dtype);
      return blocks;
    case OpKind::broadcast:
    case OpKind::scatter:
      blocks[static_cast<size_t>(operation.root)] = operation.output;
      return blocks;
    default:  // barrier
      return blocks;
  }
}

std::span<std::byte> summed(MessageHeader& header) {
  return std::as_writable_bytes(std::span(&header, 1)).first(offsetof(MessageHeader, sum));
}

}  // namespace

Arrivals::Arrivals(const Membership& membership,
                   std::function<void(const std::exception_ptr&)> broken)
    : name_(membership.name),
      rank_(membership.rank),
      members_(membership.members),
      store_(membership.world->store),
      fault_(membership.world->fault),
      broken_(std::move(broken)) {}

void Arrivals::receive(std::span<std::byte> piece) const {
  if (fault_) fault_->apply(piece);
}

void Arrivals::check(const Operation& operation, uint64_t sequence, int peer,
                     std::span<std::byte> piece, uint32_t expected, std::string_view what) const {
  receive(piece);
  compare(operation, sequence, peer, piece.size(), io::crc32c(piece), expected, what);
}

void Arrivals::compare(const Operation& operation, uint64_t sequence, int peer, size_t bytes,
                       uint32_t actual, uint32_t expected, std::string_view what) const {
  if (actual == expected) return;
  const int member = members_[static_cast<size_t>(peer)];
  const auto store = store_.lock();
  const std::string host = store ? host_of(*store, member) : "";
  const auto error = std::make_exception_ptr(DamagedData(
      peer,
      format("[{}] rank {} of group '{}': operation #{} {}: the {} of rank {} (rank {} of the "
             "job{}) arrived damaged: checksum 0x{:08x}, expected 0x{:08x}, {} bytes",
             fabric::name_of(operation.kind), rank_, name_, sequence, fabric::describe(operation),
             what, peer, member, host.empty() ? "" : ", host " + host, actual, expected, bytes)));
  broken_(error);
  std::rethrow_exception(error);
}

void MessageHeader::fill(const Operation& send) {
  signature = fabric::signature_of(send);
  data_sum = io::crc32c(send.input);
  sum = io::crc32c(summed(*this));
}

void MessageHeader::check(const Arrivals& arrivals, const Operation& recv, uint64_t sequence) {
  arrivals.check(recv, sequence, recv.root, summed(*this), sum, "header");
}

VerifiedOperation::VerifiedOperation(std::shared_ptr<const Arrivals> arrivals, Operation operation,
                                     uint64_t sequence, std::shared_ptr<const void> memory)
    : arrivals_(std::move(arrivals)),
      operation_(std::move(operation)),
      sequence_(sequence),
      memory_(std::move(memory)) {
  switch (operation_.kind) {
    case OpKind::all_reduce:
    case OpKind::reduce:
    case OpKind::reduce_scatter:
      compose_reduction();
      break;
    default:
      steps_ = {{operation_}};
  }
}

void VerifiedOperation::add_parts(size_t count, size_t bytes) {
  memory_of_parts_ = std::make_unique_for_overwrite<std::byte[]>(count * bytes);
  parts_ = {memory_of_parts_.get(), count * bytes};
  part_bytes_ = bytes;
  for (size_t i = 0; i < count; ++i) inputs_.push_back(parts_.data() + i * bytes);
}

void VerifiedOperation::compose_reduction() {
  const size_t bytes = static_cast<size_t>(operation_.count) * size_of(operation_.dtype);
  if (operation_.kind != OpKind::reduce_scatter && arrivals_->size() * bytes <= kOneStepBytes)
    return compose_one_step();

  const size_t size = arrivals_->size();
  const auto me = static_cast<size_t>(arrivals_->rank());
  const bool scatters = operation_.kind == OpKind::reduce_scatter;
  Operation move = operation_;
  move.kind = OpKind::all_to_all;
  move.root = -1;
  move.count = 0;
  if (!scatters) {
    move.input = operation_.output;
    move.send_counts = shares(operation_.count, size);
  }
  const auto own = cut(move.input, move.send_counts, move.dtype)[me];
  const int64_t mine = move.send_counts[me];
  move.recv_counts.assign(size, mine);
  // Engines copy a rank's block for itself. Where the others' blocks are consecutive without it, it
  // is left out, and is reduced in place.
  const bool leaves_out = me == 0 || me == size - 1;
  const auto without_own = [&](auto whole) {
    return !leaves_out ? whole
           : me == 0   ? whole.subspan(own.size())
                       : whole.first(whole.size() - own.size());
  };
  add_parts(size - (leaves_out ? 1 : 0), own.size());
  if (leaves_out) {
    inputs_.insert(inputs_.begin() + static_cast<std::ptrdiff_t>(me), own.data());
    move.send_counts[me] = move.recv_counts[me] = 0;
  }
  move.input = without_own(move.input);
  move.output = parts_;
  steps_ = {{move}};
  if (scatters) {
    outputs_ = {operation_.output.data()};
    return;
  }
  // Ranks other than the root of a reduce keep their values, and send what they have to the root.
  Operation back = move;
  std::swap(back.send_counts, back.recv_counts);
  back.input = parts_;
  back.output = without_own(operation_.output);
  if (operation_.root < 0) {
    for (const std::byte* input : inputs_) outputs_.push_back(const_cast<std::byte*>(input));
  } else {
    const auto root = static_cast<size_t>(operation_.root);
    back.send_counts.assign(size, 0);
    outputs_ = {parts_.data()};
    if (me != root) {
      back.recv_counts.assign(size, 0);
      back.output = {};
    } else if (leaves_out) {
      outputs_ = {const_cast<std::byte*>(own.data())};
    }
    if (me != root || !leaves_out) back.send_counts[root] = mine;
    back.input = parts_.first(static_cast<size_t>(back.send_counts[root]) * size_of(move.dtype));
  }
  sums_of_all_.resize(size);
  Operation tell = move;
  tell.kind = OpKind::all_gather;
  tell.dtype = DType::int32;
  tell.input = std::as_bytes(std::span(&sum_, 1));
  tell.output = std::as_writable_bytes(std::span(sums_of_all_));
  tell.send_counts.clear();
  tell.recv_counts.assign(size, 1);
  tell.count = static_cast<int64_t>(size);
  steps_.push_back({std::move(back), std::move(tell)});
}

void VerifiedOperation::compose_one_step() {
  const size_t size = arrivals_->size();
  const bool rooted = operation_.kind == OpKind::reduce;
  if (!rooted || arrivals_->rank() == operation_.root) {
    add_parts(size, operation_.output.size());
    outputs_ = {operation_.output.data()};
  }
  Operation move = operation_;
  move.kind = rooted ? OpKind::gather : OpKind::all_gather;
  move.input = operation_.output;
  move.output = parts_;
  if (!rooted) {
    move.recv_counts.assign(size, operation_.count);
    move.count *= static_cast<int64_t>(size);
  }
  steps_ = {{move}};
}

void VerifiedOperation::run_steps(const std::function<void(const Operation&)>& run) {
  for (size_t number = 0; number < num_steps(); ++number) {
    if (number > 0) finish(number - 1);
    for (const Operation& operation : steps_[number]) run(operation);
  }
}

std::vector<uint32_t> VerifiedOperation::sums() const {
  const auto blocks = sent_blocks(steps_[0][0], arrivals_->rank(), arrivals_->size());
  std::vector<uint32_t> sums(blocks.size());
  const std::byte* last = nullptr;  // many kinds send the same to all
  uint32_t sum_of_last = 0;
  for (size_t rank = 0; rank < blocks.size(); ++rank) {
    if (static_cast<int>(rank) == arrivals_->rank() || blocks[rank].empty()) continue;
    if (std::exchange(last, blocks[rank].data()) != blocks[rank].data())
      sum_of_last = io::crc32c(blocks[rank]);
    sums[rank] = sum_of_last;
  }
  return sums;
}

void VerifiedOperation::finish(size_t number) {
  if (number == 0 && !parts_.empty()) return reduce_parts();
  const auto me = static_cast<size_t>(arrivals_->rank());
  const auto blocks = received_blocks(steps_[number][0], arrivals_->rank(), arrivals_->size());
  for (size_t peer = 0; peer < blocks.size(); ++peer) {
    if (peer == me) continue;
    if (number == 1) {
      arrivals_->receive(std::as_writable_bytes(std::span(sums_of_all_).subspan(peer, 1)));
      expected_[peer] = sums_of_all_[peer];
    }
    if (!blocks[peer].empty())
      arrivals_->check(operation_, sequence_, static_cast<int>(peer), blocks[peer],
                       expected_[peer]);
  }
}

// Some of each part at a time: memory is read once for its checksum and for the reduction. What
// damaged data has become is not used, because the checksums are compared before this returns.
void VerifiedOperation::reduce_parts() {
  const auto me = static_cast<size_t>(arrivals_->rank());
  const auto each_peer = [&](auto visit) {
    for (size_t peer = 0; peer < arrivals_->size(); ++peer) {
      if (peer != me) visit(peer);
    }
  };
  each_peer([&](size_t peer) {
    arrivals_->receive({const_cast<std::byte*>(inputs_[peer]), part_bytes_});
  });
  std::vector<io::Crc32c> arrived(arrivals_->size());
  io::Crc32c result;
  auto inputs = inputs_;
  auto outputs = outputs_;
  for (size_t at = 0; at < part_bytes_; at += kChunkBytes) {
    const size_t bytes = std::min(kChunkBytes, part_bytes_ - at);
    each_peer([&](size_t peer) { arrived[peer].update({inputs[peer], bytes}); });
    fabric::reduce(operation_.dtype, operation_.reduce, outputs, inputs,
                   bytes / size_of(operation_.dtype));
    if (num_steps() > 1) result.update({outputs[0], bytes});
    for (const std::byte*& input : inputs) input += bytes;
    for (std::byte*& output : outputs) output += bytes;
  }
  each_peer([&](size_t peer) {
    arrivals_->compare(operation_, sequence_, static_cast<int>(peer), part_bytes_,
                       arrived[peer].value(), expected_[peer]);
  });
  sum_ = result.value();
}

}  // namespace lockstep::comm::detail
