// SPDX-License-Identifier: Apache-2.0
// A bit that flips on its way from one host to another, for tests. Private to comm.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace lockstep::comm::detail {

// From LOCKSTEP_FAULT=rank=R,message=N,action=flip:BIT: of all that rank R of the job receives and
// compares with a checksum, bit BIT of the N-th piece is flipped before it is compared. N counts
// from 1, BIT from 0 and again from the start at the piece's end. Entries are separated by
// semicolons; those without message= belong to others. Thread safe.
class MessageFault {
 public:
  // For the entry of this rank; null where there is none. Throws ConfigError for an entry that
  // cannot be read.
  static std::shared_ptr<MessageFault> parse(const std::string& text, int rank);
  static std::shared_ptr<MessageFault> from_environment(int rank);

  // A piece has arrived. Nothing is no piece.
  void apply(std::span<std::byte> piece);

 private:
  uint64_t message_ = 0, bit_ = 0;
  std::atomic<uint64_t> arrived_{0};
};

}  // namespace lockstep::comm::detail
