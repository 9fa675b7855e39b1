// SPDX-License-Identifier: Apache-2.0
// Data whose every reduction is exact, and comparisons that say what is wrong. Private to the
// conformance checks.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/collectives.h"

namespace lockstep::comm::conformance {

// A group, and where the tensors are that it is tried with.
class Ranks : public Group {
 public:
  Ranks(Group group, at::Device device) : Group(std::move(group)), device_(device) {}

  at::Device device() const { return device_; }
  at::TensorOptions options(at::ScalarType type = at::kFloat) const {
    return at::TensorOptions().dtype(type).device(device_);
  }
  // What `rank` contributes: whole numbers from 0 to 3, so that every sum and product is exact in
  // every dtype and order.
  at::Tensor contribution(int rank, int64_t count, DType dtype, int64_t first = 0) const;
  // Of all ranks: `count` elements from the element `first` on.
  std::vector<at::Tensor> contributions(int64_t count, DType dtype, int64_t first = 0) const;
  // Whole numbers whose sums overflow: the largest, the smallest, and some between.
  at::Tensor near_limits(int rank, int64_t count, DType dtype) const;
  // How far a result may be off: not at all, but NCCL's averages are sums of rounded parts.
  double tolerance(ReduceOp op, DType dtype) const;

 private:
  at::Device device_;
};

inline constexpr DType kAllTypes[] = {DType::float64,  DType::float32, DType::float16,
                                      DType::bfloat16, DType::int64,   DType::int32,
                                      DType::int8,     DType::uint8,   DType::boolean};
constexpr ReduceOp kAllOps[] = {ReduceOp::sum, ReduceOp::avg, ReduceOp::product, ReduceOp::min,
                                ReduceOp::max};
// Nothing, one element, odd sizes, and both sides of the sizes where backends change their ways.
inline constexpr int64_t kSizes[] = {0, 1, 3, 1000, 8193, 70'001};

// Throws Error with `what` unless the condition holds: the backend breaks a promise.
void verify(bool condition, const std::string& what);
void verify_equal(const at::Tensor& actual, const at::Tensor& expected, const std::string& what,
                  double tolerance = 0);

at::Tensor expected_reduction(const std::vector<at::Tensor>& parts, ReduceOp op);

// What must be true of handles (conformance_handles.cpp).
void check_overlapping_calls(const Ranks& group);
void check_unwaited(const Ranks& group);
void check_waiting_elsewhere(const Ranks& group);

// What must be refused (conformance_refusals.cpp).
void check_bad_arguments(const Ranks& group);
void check_mismatches(const Ranks& group);
void check_fewer_calls(const Ranks& group);
void check_mismatched_message(const Ranks& group);

// "all_reduce of 1000 float32"
std::string label(const char* operation, DType dtype, int64_t count);

}  // namespace lockstep::comm::conformance
