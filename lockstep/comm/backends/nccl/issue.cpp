// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/backends/nccl/issue.h"

#include <algorithm>
#include <utility>

#include "lockstep/core/error.h"

namespace lockstep::comm::nccl {
namespace {

using fabric::Operation;
using fabric::OpKind;
using fabric::ReduceOp;

DataType type_of(DType dtype) {
  switch (dtype) {
    case DType::float64:
      return DataType::float64;
    case DType::float32:
      return DataType::float32;
    case DType::float16:
      return DataType::float16;
    case DType::bfloat16:
      return DataType::bfloat16;
    case DType::int64:
      return DataType::int64;
    case DType::int32:
      return DataType::int32;
    case DType::int8:
      return DataType::int8;
    default:
      return DataType::uint8;  // a bool is 0 or 1
  }
}

RedOp reduction_of(const Operation& operation, int size) {
  const bool any = operation.reduce == ReduceOp::sum || operation.reduce == ReduceOp::max;
  if (operation.dtype == DType::boolean) return any ? RedOp::max : RedOp::min;
  switch (operation.reduce) {
    case ReduceOp::avg:
      // The kernel with which NCCL 2.28 averages over one rank leaves out elements of float64.
      return size == 1 ? RedOp::sum : RedOp::avg;
    case ReduceOp::product:
      return RedOp::product;
    case ReduceOp::min:
      return RedOp::min;
    case ReduceOp::max:
      return RedOp::max;
    default:
      return RedOp::sum;
  }
}

// What several calls came to: an error before "in progress" before success.
class Outcome {
 public:
  void add(Result result) {
    const bool is_error = result != Result::success && result != Result::in_progress;
    if (result_ == Result::success || (result_ == Result::in_progress && is_error))
      result_ = result;
  }
  Result result() const { return result_; }

 private:
  Result result_ = Result::success;
};

// Calls that NCCL runs together. A group that was begun is always ended.
template <class Body>
Result run_in_nccl_group(const Api& api, Body body) {
  Outcome outcome;
  outcome.add(api.group_start());
  body(outcome);
  outcome.add(api.group_end());
  return outcome.result();
}

class Issue {
 public:
  Issue(const Engine& engine, const Seat& seat, const Operation& operation)
      : api_(*engine.api),
        runtime_(*engine.runtime),
        seat_(seat),
        operation_(operation),
        type_(type_of(operation.dtype)),
        reduction_(reduction_of(operation, seat.size)),
        width_(size_of(operation.dtype)),
        input_(operation.input.data()),
        output_(operation.output.data()),
        rank_(static_cast<size_t>(seat.rank)),
        size_(static_cast<size_t>(seat.size)) {}

  Result run() {
    switch (operation_.kind) {
      case OpKind::all_reduce:
        return api_.all_reduce(output_, output_, output_count(), type_, reduction_, seat_.comm,
                               seat_.stream);
      case OpKind::reduce:
        return api_.reduce(output_, output_, output_count(), type_, reduction_, operation_.root,
                           seat_.comm, seat_.stream);
      case OpKind::broadcast:
        return api_.broadcast(output_, output_, output_count(), type_, operation_.root, seat_.comm,
                              seat_.stream);
      case OpKind::all_gather:
        return all_gather();
      case OpKind::reduce_scatter:
        return reduce_scatter();
      case OpKind::all_to_all:
        return all_to_all();
      case OpKind::gather:
        return gather();
      case OpKind::scatter:
        return scatter();
      case OpKind::send:
        return input_count() == 0 ? Result::success : send(input_, input_count(), 1 - rank_);
      case OpKind::recv:
        return output_count() == 0 ? Result::success : recv(output_, output_count(), 1 - rank_);
      default:
        check(false, "NCCL was asked for a barrier");
        return Result::success;
    }
  }

 private:
  size_t input_count() const { return operation_.input.size() / width_; }
  size_t output_count() const { return operation_.output.size() / width_; }

  static bool are_equal(const std::vector<int64_t>& counts) {
    return std::all_of(counts.begin(), counts.end(), [&](int64_t n) { return n == counts[0]; });
  }
  void copy(std::byte* to, const std::byte* from, size_t count) const {
    if (to != from && count > 0) runtime_.copy(to, from, count * width_, seat_.stream);
  }

  Result all_gather() {
    const auto& counts = operation_.recv_counts;
    if (are_equal(counts)) {
      return api_.all_gather(input_, output_, static_cast<size_t>(counts[0]), type_, seat_.comm,
                             seat_.stream);
    }
    return run_in_nccl_group(api_, [&](Outcome& outcome) {
      std::byte* block = output_;
      for (size_t root = 0; root < size_; ++root) {
        const auto count = static_cast<size_t>(counts[root]);
        const void* const source = root == rank_ ? static_cast<const void*>(input_) : block;
        if (count > 0)
          outcome.add(api_.broadcast(source, block, count, type_, static_cast<int>(root),
                                     seat_.comm, seat_.stream));
        block += count * width_;
      }
    });
  }

  Result reduce_scatter() {
    const auto& counts = operation_.send_counts;
    if (are_equal(counts)) {
      return api_.reduce_scatter(input_, output_, static_cast<size_t>(counts[0]), type_, reduction_,
                                 seat_.comm, seat_.stream);
    }
    return run_in_nccl_group(api_, [&](Outcome& outcome) {
      const std::byte* block = input_;
      for (size_t root = 0; root < size_; ++root) {
        const auto count = static_cast<size_t>(counts[root]);
        if (count > 0)
          outcome.add(api_.reduce(block, root == rank_ ? output_ : nullptr, count, type_,
                                  reduction_, static_cast<int>(root), seat_.comm, seat_.stream));
        block += count * width_;
      }
    });
  }

  Result all_to_all() {
    const std::byte* mine = nullptr;
    std::byte* place = nullptr;
    const Result result = run_in_nccl_group(api_, [&](Outcome& outcome) {
      const std::byte* from = input_;
      std::byte* to = output_;
      for (size_t peer = 0; peer < size_; ++peer) {
        const auto sends = static_cast<size_t>(operation_.send_counts[peer]),
                   receives = static_cast<size_t>(operation_.recv_counts[peer]);
        if (peer == rank_) {
          mine = from;
          place = to;
        } else {
          if (sends > 0) outcome.add(send(from, sends, peer));
          if (receives > 0) outcome.add(recv(to, receives, peer));
        }
        from += sends * width_;
        to += receives * width_;
      }
    });
    copy(place, mine, static_cast<size_t>(operation_.recv_counts[rank_]));
    return result;
  }

  Result gather() {
    if (seat_.rank != operation_.root)
      return send(input_, input_count(), static_cast<size_t>(operation_.root));
    const size_t count = input_count();
    copy(output_ + rank_ * count * width_, input_, count);
    return run_in_nccl_group(api_, [&](Outcome& outcome) {
      for (size_t peer = 0; peer < size_; ++peer) {
        if (peer != rank_) outcome.add(recv(output_ + peer * count * width_, count, peer));
      }
    });
  }

  Result scatter() {
    if (seat_.rank != operation_.root)
      return recv(output_, output_count(), static_cast<size_t>(operation_.root));
    const size_t count = output_count();
    copy(output_, input_ + rank_ * count * width_, count);
    return run_in_nccl_group(api_, [&](Outcome& outcome) {
      for (size_t peer = 0; peer < size_; ++peer) {
        if (peer != rank_) outcome.add(send(input_ + peer * count * width_, count, peer));
      }
    });
  }

  Result send(const std::byte* from, size_t count, size_t peer) const {
    return api_.send(from, count, type_, static_cast<int>(peer), seat_.comm, seat_.stream);
  }
  Result recv(std::byte* to, size_t count, size_t peer) const {
    return api_.recv(to, count, type_, static_cast<int>(peer), seat_.comm, seat_.stream);
  }

  const Api& api_;
  const Runtime& runtime_;
  const Seat& seat_;
  const Operation& operation_;
  DataType type_;
  RedOp reduction_;
  size_t width_;
  const std::byte* input_;
  std::byte* output_;
  size_t rank_, size_;
};

}  // namespace

Result issue(const Engine& engine, const Seat& seat, const Operation& operation) {
  return Issue(engine, seat, operation).run();
}

}  // namespace lockstep::comm::nccl
