// Data whose every reduction is exact, and comparisons that say what is wrong. Private to the
// conformance checks.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "lockstep/comm/collectives.h"

namespace lockstep::comm::conformance {

// Throws `what` unless the condition holds.
void require(bool condition, const std::string& what);
void require_equal(const at::Tensor& actual, const at::Tensor& expected, const std::string& what);

// What `rank` contributes: whole numbers from 0 to 3, so that every sum and product is exact in
// every dtype and order.
at::Tensor contribution(int rank, int64_t count, DType dtype);
std::vector<at::Tensor> all_contributions(const Group& group, int64_t count, DType dtype);
at::Tensor expected_reduction(const std::vector<at::Tensor>& parts, ReduceOp op);

// "all_reduce of 1000 float32"
std::string label(const char* operation, DType dtype, int64_t count);

}  // namespace lockstep::comm::conformance
