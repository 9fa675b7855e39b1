// SPDX-License-Identifier: Apache-2.0
// A way to form collectives out of operations of other groups. Private to comm.
#pragma once

#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "lockstep/comm/backend.h"
#include "lockstep/core/clock.h"
#include "lockstep/fabric/operation.h"
#include "lockstep/layout/parallel_config.h"

namespace lockstep::comm::strategy {

using detail::GroupImpl;
using detail::Membership;
using detail::Pending;
using fabric::Operation;
using fabric::OpKind;

// One operation to run. Reductions are sums, products, minima or maxima of what plain engines can
// reduce (adapt.h). `memory` keeps the buffers alive, also those that a failure leaves in use.
struct CollectiveJob {
  Operation operation;
  std::shared_ptr<const void> memory;
  Deadline deadline;

  size_t width() const { return size_of(operation.dtype); }
};

// Memory for what is on its way, kept alive with the job's own.
std::span<std::byte> add_scratch(CollectiveJob& job, size_t bytes);

class Algorithm {
 public:
  virtual ~Algorithm() = default;
  virtual layout::CommStrategy strategy() const = 0;
  virtual bool covers(OpKind kind) const = 0;
  // Called with one job at a time, in the same order on all ranks. Returns when it is done.
  virtual void run(CollectiveJob& job) = 0;
  // The groups it uses, none of which carries anything else.
  virtual std::vector<GroupImpl*> groups() const = 0;
};

// One group of an algorithm, with operations in bytes. As in any group, messages and collectives
// are in order and independent of each other. A PeerLost has the algorithm's rank.
class AlgorithmGroup {
 public:
  // `ranks` are those of its members in the group that the algorithm is for.
  AlgorithmGroup(std::shared_ptr<GroupImpl> group, std::vector<int> ranks)
      : group_(std::move(group)), ranks_(std::move(ranks)) {}

  GroupImpl* group() const { return group_.get(); }
  int rank() const { return group_->membership().rank; }
  int size() const { return group_->membership().size(); }

  using Bytes = std::span<std::byte>;
  using ConstBytes = std::span<const std::byte>;
  using Running = std::shared_ptr<Pending>;
  [[nodiscard]] Running send(const CollectiveJob& job, ConstBytes data, int to) const;
  [[nodiscard]] Running recv(const CollectiveJob& job, Bytes data, int from) const;
  // Counts are in elements of the job's dtype; a group of one rank copies.
  [[nodiscard]] Running all_reduce(const CollectiveJob& job, Bytes data) const;
  [[nodiscard]] Running broadcast(const CollectiveJob& job, Bytes data, int root) const;
  [[nodiscard]] Running reduce_scatter(const CollectiveJob& job, Bytes output, ConstBytes input,
                                       std::vector<int64_t> counts) const;
  [[nodiscard]] Running all_gather(const CollectiveJob& job, Bytes output, ConstBytes input,
                                   std::vector<int64_t> counts) const;
  [[nodiscard]] Running all_to_all(const CollectiveJob& job, Bytes output, ConstBytes input,
                                   std::vector<int64_t> send_counts,
                                   std::vector<int64_t> recv_counts) const;

 private:
  class Step;

  Operation describe(const CollectiveJob& job, OpKind kind) const;
  Running submit(const CollectiveJob& job, Operation operation) const;
  static Running copy(Bytes to, ConstBytes from);

  std::shared_ptr<GroupImpl> group_;
  std::vector<int> ranks_;
};

// Writes the sum of two to `to`, which may be one of them, in the job's sense of adding.
void accumulate(const CollectiveJob& job, std::span<std::byte> to, std::span<const std::byte> one,
                std::span<const std::byte> other);

// How data is cut so that the steps of an algorithm overlap: `total` bytes in equal pieces of whole
// elements, the last one shorter. Enough of them to overlap, none so small that a step costs more
// than what it carries.
class Pieces {
 public:
  Pieces(size_t total, size_t width, size_t most = 16, size_t smallest = 256 << 10);
  // The pieces of one block of at most `total` bytes.
  size_t count(size_t block) const { return (block + piece_ - 1) / piece_; }
  size_t bytes() const { return piece_; }
  template <class Span>
  Span of(Span block, size_t index) const {
    const size_t begin = index * piece_;
    return block.subspan(begin, std::min(piece_, block.size() - begin));
  }

 private:
  size_t piece_;
};

}  // namespace lockstep::comm::strategy
