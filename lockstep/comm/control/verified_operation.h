// SPDX-License-Identifier: Apache-2.0
// Data that comes from another host is compared with a checksum of what was sent. Private to comm.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/comm/backend.h"
#include "lockstep/fabric/operation.h"

namespace lockstep::comm::detail {

// Compares what arrives at a rank of a group. May outlive the group. Thread safe.
class Arrivals {
 public:
  // `broken` is told of damage at once, whether or not a thread waits for the operation.
  Arrivals(const Membership& membership, std::function<void(const std::exception_ptr&)> broken);

  int rank() const { return rank_; }
  size_t size() const { return members_.size(); }
  // A fault that a test asks for changes it now.
  void receive(std::span<std::byte> piece) const;
  // Throws DamagedData that names `peer` unless the checksums of a piece are the same. `what` it
  // is, in words.
  void compare(const fabric::Operation& operation, uint64_t sequence, int peer, size_t bytes,
               uint32_t actual, uint32_t expected, std::string_view what = "data") const;
  // Both, for a piece that nothing else is done with.
  void check(const fabric::Operation& operation, uint64_t sequence, int peer,
             std::span<std::byte> piece, uint32_t expected, std::string_view what = "data") const;

 private:
  std::string name_;
  int rank_;
  std::vector<int> members_;
  std::weak_ptr<launch::Store> store_;
  std::shared_ptr<MessageFault> fault_;
  std::function<void(const std::exception_ptr&)> broken_;
};

// What goes before the data of a message. Plain bytes; it is filled in where it is sent from, so
// that its checksum is that of all of them.
struct MessageHeader {
  fabric::Signature signature = {};
  uint32_t data_sum = 0;
  uint32_t sum = 0;  // of what precedes it

  void fill(const fabric::Operation& send);
  // One that has arrived for this recv. Throws DamagedData.
  void check(const Arrivals& arrivals, const fabric::Operation& recv, uint64_t sequence);
};

// A collective as steps in which an engine only moves data: an engine that adds up as well could
// give a wrong sum that looks right on every rank. Reductions have the order of fabric/reduce.h.
// The checksums of the first step travel with what ranks compare before it begins, those of the
// second concurrently with its data. Owns what the engine reads and writes.
class VerifiedOperation {
 public:
  VerifiedOperation(std::shared_ptr<const Arrivals> arrivals, fabric::Operation operation,
                    uint64_t sequence, std::shared_ptr<const void> memory);

  // What this rank sends to each in the first step, and what each has said that it sends here.
  std::vector<uint32_t> sums() const;
  void expect(std::vector<uint32_t> sums) { expected_ = std::move(sums); }

  size_t num_steps() const { return steps_.size(); }
  // Operations that may run at the same time.
  const std::vector<fabric::Operation>& step(size_t number) const { return steps_[number]; }
  // When all of them have ended: compares what has arrived, and computes what is sent next or the
  // result. Throws DamagedData.
  void finish(size_t number);
  // All of it but the last finish(), by an engine that returns when an operation has ended.
  void run_steps(const std::function<void(const fabric::Operation&)>& run);

 private:
  void compose_reduction();
  void compose_one_step();
  void add_parts(size_t count, size_t bytes);
  void reduce_parts();

  std::shared_ptr<const Arrivals> arrivals_;
  fabric::Operation operation_;
  uint64_t sequence_;
  std::shared_ptr<const void> memory_;
  std::vector<std::vector<fabric::Operation>> steps_;
  std::vector<uint32_t> expected_;
  // Of a reduction: the parts that arrive, all of one size; where the part of each rank is, and
  // where their reduction goes.
  std::unique_ptr<std::byte[]> memory_of_parts_;
  std::span<std::byte> parts_;
  size_t part_bytes_ = 0;
  std::vector<const std::byte*> inputs_;
  std::vector<std::byte*> outputs_;
  // Of the second step.
  uint32_t sum_ = 0;
  std::vector<uint32_t> sums_of_all_;
};

}  // namespace lockstep::comm::detail
