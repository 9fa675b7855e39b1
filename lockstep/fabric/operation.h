// SPDX-License-Identifier: Apache-2.0
// One collective or point-to-point operation, described without torch: what every backend executes
// and every fingerprint is made of.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/core/clock.h"
#include "lockstep/core/dtype.h"

namespace lockstep::fabric {

enum class OpKind : uint8_t {
  all_reduce,
  reduce,
  broadcast,
  all_gather,
  reduce_scatter,
  all_to_all,
  gather,
  scatter,
  send,
  recv,
  barrier
};
enum class ReduceOp : uint8_t { sum, avg, product, min, max };

constexpr bool is_message(OpKind kind) { return kind == OpKind::send || kind == OpKind::recv; }

std::string_view name_of(OpKind kind);
std::string_view name_of(ReduceOp op);

struct Operation {
  OpKind kind = OpKind::barrier;
  ReduceOp reduce = ReduceOp::sum;
  DType dtype = DType::uint8;
  int root = -1;  // root of a rooted collective, peer of a send or recv
  // What each kind reads and writes, in elements (n ranks, block r belongs to rank r):
  //   all_reduce      output (in place)
  //   reduce          output (in place at the root, read elsewhere)
  //   broadcast       output (read at the root)
  //   all_gather      input -> n blocks of output (recv_counts)
  //   reduce_scatter  n blocks of input (send_counts) -> output
  //   all_to_all      n blocks of input (send_counts) -> n blocks of output (recv_counts)
  //   gather          input -> n equal blocks of output at the root
  //   scatter         n equal blocks of input at the root -> output
  //   send            input
  //   recv            output
  std::span<const std::byte> input = {};
  std::span<std::byte> output = {};
  std::vector<int64_t> send_counts = {}, recv_counts = {};
  std::string tag =
      {};  // what the caller calls the data, e.g. a bucket's name; compared between ranks
  milliseconds timeout = kDefaultTimeout;

  // The size that ranks must agree on, in elements: of the whole for all_gather, reduce_scatter and
  // all_reduce, of one block for gather and scatter, of the message for send and recv, 0 for
  // barrier and all_to_all (whose blocks are compared).
  int64_t count = 0;
  // Compared with what the other ranks call, but run by other means: no data moves here.
  bool announced = false;
  // Announced, and already running in another engine: submit() makes one attempt and wakes no
  // thread unless other operations are unfinished. wait() and the next submit() advance it.
  bool unhurried = false;

  // The device that input and output lie on, for groups that take such memory; -1: the host's.
  int device = -1;

  // Its entry in the flight recorder; 0: none.
  uint64_t record = 0;

  // What is left to do when the data has arrived, such as a copy to where it belongs. Called once,
  // by the thread that finds the operation complete, before anyone can see that it is done; on a
  // device, in the order of its stream. Not called where the operation has failed.
  std::function<void()> finish = {};
};

// What ranks compare before data moves: the parts of an operation that must be the same on all of
// them (for a send and its recv, all but kind and root). Plain bytes, so that it can lie in shared
// memory or travel.
struct Signature {
  OpKind kind;
  ReduceOp reduce;
  DType dtype;
  int32_t root;
  int64_t count;
  uint64_t
      counts_hash;  // of the block sizes of all_gather and reduce_scatter, and a long tag's end
  char tag[40];

  bool operator==(const Signature&) const = default;
};

Signature signature_of(const Operation& operation);

// "all_reduce(float32[1024], sum, tag 'bucket0')"
std::string describe(const Signature& signature);
std::string describe(const Operation& operation);

}  // namespace lockstep::fabric
