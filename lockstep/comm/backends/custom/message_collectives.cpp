// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/backends/custom/message_collectives.h"

#include <cstring>
#include <exception>

#include "lockstep/comm/blocks.h"
#include "lockstep/comm/control/watched_operation.h"
#include "lockstep/fabric/reduce.h"

namespace lockstep::comm::detail {
namespace {

using fabric::Operation;
using fabric::OpKind;

MessageCollectives::Inputs as_inputs(const MessageCollectives::Outputs& blocks) {
  return {blocks.begin(), blocks.end()};
}

}  // namespace

void MessageCollectives::exchange(const Inputs& sends, const Outputs& receives) {
  const auto me = static_cast<size_t>(rank_);
  // In round r ranks whose sum is r modulo the size meet: each has one partner, and all go through
  // the rounds in the same order, so the rank that is furthest behind never waits for one ahead of
  // it.
  const auto partner = [&](size_t round) { return (round + size_ - me) % size_; };
  const auto sent = std::make_shared<Completion>(1);
  sender_.post([&, sent] {
    std::exception_ptr error;
    try {
      for (size_t round = 0; round < size_; ++round) {
        const size_t peer = partner(round);
        if (peer != me && !sends[peer].empty())
          transport_.send(static_cast<int>(peer), sends[peer]);
      }
    } catch (...) {
      error = std::current_exception();
      transport_.abort();  // this rank may be waiting for an answer to what was not sent
    }
    sent->part_done(error);
  });
  std::exception_ptr failure;
  try {
    for (size_t round = 0; round < size_; ++round) {
      const size_t peer = partner(round);
      if (peer != me && !receives[peer].empty())
        transport_.recv(static_cast<int>(peer), receives[peer]);
    }
  } catch (...) {
    failure = std::current_exception();
    transport_.abort();  // the sender uses what ends with this call
  }
  while (!sent->wait_for(kDefaultTimeout)) {
  }
  if (!failure) failure = sent->error();
  if (failure) std::rethrow_exception(failure);
  if (!receives[me].empty() && receives[me].data() != sends[me].data())
    std::memmove(receives[me].data(), sends[me].data(), receives[me].size());
}

// `mine` is what this rank has for each; `result` becomes the reduction of what all have for it.
void MessageCollectives::reduce_blocks(const Operation& operation, const Inputs& mine,
                                       std::span<std::byte> result) {
  const auto me = static_cast<size_t>(rank_);
  const auto elements = static_cast<int64_t>(mine[me].size() / size_of(operation.dtype));
  std::vector<std::byte> memory(mine[me].size() * size_);
  Outputs parts = cut(std::span(memory), std::vector<int64_t>(size_, elements), operation.dtype);
  exchange(mine, parts);
  std::vector<const std::byte*> inputs;
  for (const auto& part : parts) inputs.push_back(part.data());
  std::byte* output = result.data();
  fabric::reduce(operation.dtype, operation.reduce, std::span(&output, 1), inputs,
                 static_cast<size_t>(elements));
}

void MessageCollectives::all_reduce(const Operation& operation) {
  const auto me = static_cast<size_t>(rank_);
  const Outputs blocks = cut(operation.output, shares(operation.count, size_), operation.dtype);
  reduce_blocks(operation, as_inputs(blocks), blocks[me]);
  exchange(Inputs(size_, blocks[me]), blocks);
}

void MessageCollectives::reduce(const Operation& operation) {
  const auto me = static_cast<size_t>(rank_), root = static_cast<size_t>(operation.root);
  const Outputs blocks = cut(operation.output, shares(operation.count, size_), operation.dtype);
  std::vector<std::byte> block(blocks[me].size());  // ranks that are not the root keep their values
  reduce_blocks(operation, as_inputs(blocks), block);
  Inputs sends(size_);
  sends[root] = block;
  exchange(sends, me == root ? blocks : Outputs(size_));
}

// The root gives each rank a part, and all exchange their parts: no rank sends all of it many
// times.
void MessageCollectives::broadcast(const Operation& operation) {
  const auto me = static_cast<size_t>(rank_), root = static_cast<size_t>(operation.root);
  const Outputs blocks = cut(operation.output, shares(operation.count, size_), operation.dtype);
  Outputs receives(size_);
  receives[root] = blocks[me];
  exchange(me == root ? as_inputs(blocks) : Inputs(size_), receives);
  exchange(Inputs(size_, blocks[me]), blocks);
}

void MessageCollectives::run(const Operation& operation) {
  if (transport_.runs(operation)) return transport_.run(operation);
  const auto root = static_cast<size_t>(std::max(0, operation.root));
  const bool at_root = rank_ == operation.root;
  const std::vector<int64_t> equal(size_, operation.count);
  Inputs sends(size_);
  Outputs receives(size_);
  switch (operation.kind) {
    case OpKind::all_reduce:
      return all_reduce(operation);
    case OpKind::reduce:
      return reduce(operation);
    case OpKind::broadcast:
      return broadcast(operation);
    case OpKind::reduce_scatter:
      return reduce_blocks(operation, cut(operation.input, operation.send_counts, operation.dtype),
                           operation.output);
    case OpKind::all_gather:
      return exchange(Inputs(size_, operation.input),
                      cut(operation.output, operation.recv_counts, operation.dtype));
    case OpKind::all_to_all:
      return exchange(cut(operation.input, operation.send_counts, operation.dtype),
                      cut(operation.output, operation.recv_counts, operation.dtype));
    case OpKind::gather:
      sends[root] = operation.input;
      if (at_root) receives = cut(operation.output, equal, operation.dtype);
      return exchange(sends, receives);
    case OpKind::scatter:
      if (at_root) sends = cut(operation.input, equal, operation.dtype);
      receives[root] = operation.output;
      return exchange(sends, receives);
    default: {
      const std::byte token{};
      std::vector<std::byte> tokens(size_);
      return exchange(Inputs(size_, std::span(&token, 1)),
                      cut(std::span(tokens), std::vector<int64_t>(size_, 1), DType::uint8));
    }
  }
}

}  // namespace lockstep::comm::detail
