// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/strategy/algorithm.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/fabric/reduce.h"

namespace lockstep::comm::strategy {
namespace {

// With the rank's number in the group of the strategy.
template <class Failure>
[[noreturn]] void rethrow(const Failure& failure, const std::vector<int>& ranks) {
  throw Failure(ranks[static_cast<size_t>(failure.rank())], failure.what());
}

}  // namespace

std::span<std::byte> add_scratch(CollectiveJob& job, size_t bytes) {
  const std::shared_ptr<std::byte[]> scratch(new std::byte[bytes]);
  job.memory =
      std::make_shared<std::pair<std::shared_ptr<const void>, std::shared_ptr<const void>>>(
          std::move(job.memory), scratch);
  return {scratch.get(), bytes};
}

Operation AlgorithmGroup::describe(const CollectiveJob& job, OpKind kind) const {
  return {.kind = kind,
          .reduce = job.operation.reduce,
          .dtype = job.operation.dtype,
          .tag = job.operation.tag,
          .timeout = std::max(milliseconds{1}, job.deadline.left())};
}

// `work` is null where there is nothing to wait for.
class AlgorithmGroup::Step final : public Pending {
 public:
  Step() = default;
  Step(Running work, std::vector<int> ranks) : work_(std::move(work)), ranks_(std::move(ranks)) {}

  void wait() override {
    if (!work_) return;
    try {
      work_->wait();
    } catch (const PeerLost& lost) {
      rethrow(lost, ranks_);
    } catch (const DamagedData& damaged) {
      rethrow(damaged, ranks_);
    }
  }
  bool done() const override { return !work_ || work_->done(); }

 private:
  Running work_;
  std::vector<int> ranks_;
};

AlgorithmGroup::Running AlgorithmGroup::submit(const CollectiveJob& job,
                                               Operation operation) const {
  try {
    return std::make_shared<Step>(group_->submit(std::move(operation), job.memory), ranks_);
  } catch (const PeerLost& lost) {
    rethrow(lost, ranks_);
  } catch (const DamagedData& damaged) {
    rethrow(damaged, ranks_);
  }
}

AlgorithmGroup::Running AlgorithmGroup::copy(Bytes to, ConstBytes from) {
  if (!from.empty() && to.data() != from.data()) std::memmove(to.data(), from.data(), from.size());
  return std::make_shared<Step>();
}

AlgorithmGroup::Running AlgorithmGroup::send(const CollectiveJob& job, ConstBytes data,
                                             int to) const {
  Operation operation = describe(job, OpKind::send);
  operation.input = data;
  operation.root = to;
  operation.count = static_cast<int64_t>(data.size() / job.width());
  return submit(job, std::move(operation));
}

AlgorithmGroup::Running AlgorithmGroup::recv(const CollectiveJob& job, Bytes data, int from) const {
  Operation operation = describe(job, OpKind::recv);
  operation.output = data;
  operation.root = from;
  operation.count = static_cast<int64_t>(data.size() / job.width());
  return submit(job, std::move(operation));
}

AlgorithmGroup::Running AlgorithmGroup::all_reduce(const CollectiveJob& job, Bytes data) const {
  if (size() == 1 || data.empty()) return std::make_shared<Step>();
  Operation operation = describe(job, OpKind::all_reduce);
  operation.input = operation.output = data;
  operation.count = static_cast<int64_t>(data.size() / job.width());
  return submit(job, std::move(operation));
}

AlgorithmGroup::Running AlgorithmGroup::broadcast(const CollectiveJob& job, Bytes data,
                                                  int root) const {
  if (size() == 1 || data.empty()) return std::make_shared<Step>();
  Operation operation = describe(job, OpKind::broadcast);
  operation.output = data;
  if (rank() == root) operation.input = data;
  operation.root = root;
  operation.count = static_cast<int64_t>(data.size() / job.width());
  return submit(job, std::move(operation));
}

AlgorithmGroup::Running AlgorithmGroup::reduce_scatter(const CollectiveJob& job, Bytes output,
                                                       ConstBytes input,
                                                       std::vector<int64_t> counts) const {
  if (size() == 1) return copy(output, input);
  Operation operation = describe(job, OpKind::reduce_scatter);
  operation.input = input;
  operation.output = output;
  operation.send_counts = std::move(counts);
  operation.count = static_cast<int64_t>(input.size() / job.width());
  return submit(job, std::move(operation));
}

AlgorithmGroup::Running AlgorithmGroup::all_gather(const CollectiveJob& job, Bytes output,
                                                   ConstBytes input,
                                                   std::vector<int64_t> counts) const {
  if (size() == 1) return copy(output, input);
  Operation operation = describe(job, OpKind::all_gather);
  operation.input = input;
  operation.output = output;
  operation.recv_counts = std::move(counts);
  operation.count = static_cast<int64_t>(output.size() / job.width());
  return submit(job, std::move(operation));
}

AlgorithmGroup::Running AlgorithmGroup::all_to_all(const CollectiveJob& job, Bytes output,
                                                   ConstBytes input,
                                                   std::vector<int64_t> send_counts,
                                                   std::vector<int64_t> recv_counts) const {
  if (size() == 1) return copy(output, input);
  Operation operation = describe(job, OpKind::all_to_all);
  operation.input = input;
  operation.output = output;
  operation.send_counts = std::move(send_counts);
  operation.recv_counts = std::move(recv_counts);
  return submit(job, std::move(operation));
}

void accumulate(const CollectiveJob& job, std::span<std::byte> to, std::span<const std::byte> one,
                std::span<const std::byte> other) {
  std::byte* const output = to.data();
  const std::byte* const inputs[] = {one.data(), other.data()};
  fabric::reduce(job.operation.dtype, job.operation.reduce, {&output, 1}, inputs,
                 to.size() / job.width());
}

Pieces::Pieces(size_t total, size_t width, size_t most, size_t smallest) {
  const size_t share = std::max(smallest, (total + most - 1) / most);
  piece_ = (share + width - 1) / width * width;
}

}  // namespace lockstep::comm::strategy
