// SPDX-License-Identifier: Apache-2.0
// Collectives made of messages between pairs of ranks, for transports that have nothing better.
#pragma once

#include <span>
#include <vector>

#include "lockstep/comm/custom_backend.h"
#include "lockstep/comm/serial_executor.h"

namespace lockstep::comm::detail {

// Every rank exchanges blocks with every other, one pair after another in an order that cannot
// lock, both directions at once. Reductions are taken in the order of fabric/reduce.h: a sum has
// the bits that it has under thread and shm. One operation at a time.
class MessageCollectives {
 public:
  MessageCollectives(Transport& transport, int rank, int size)
      : transport_(transport), rank_(rank), size_(static_cast<size_t>(size)) {}

  // By the transport itself where it can.
  void run(const fabric::Operation& operation);

  using Inputs = std::vector<std::span<const std::byte>>;
  using Outputs = std::vector<std::span<std::byte>>;
  // Block r of `sends` goes to rank r, block r of `receives` comes from it; what a rank has for
  // itself is copied. Both sides of a pair know the sizes.
  void exchange(const Inputs& sends, const Outputs& receives);

 private:
  void reduce_blocks(const fabric::Operation& operation, const Inputs& mine,
                     std::span<std::byte> result);
  void all_reduce(const fabric::Operation& operation);
  void reduce(const fabric::Operation& operation);
  void broadcast(const fabric::Operation& operation);

  Transport& transport_;
  int rank_;
  size_t size_;
  SerialExecutor sender_;
};

}  // namespace lockstep::comm::detail
