// SPDX-License-Identifier: Apache-2.0
// Brings an operation into the form that plain engines can run.
#pragma once

#include <functional>
#include <memory>

#include "lockstep/core/torch_fwd.h"
#include "lockstep/fabric/operation.h"

namespace lockstep::comm::detail {

// Both, one after the other; either may be empty.
std::function<void()> chain(std::function<void()> first, std::function<void()> second);

struct Adapted {
  fabric::Operation operation;
  std::shared_ptr<const void> memory;
};

// After this a reduction is a sum, product, min or max of float64, float32, int64, int32, int8 or
// uint8: 16-bit floats are widened to float32 and rounded once at the end, avg becomes a sum and a
// division (of whole numbers: see to_summand), bool becomes uint8, min and max of floats in host
// memory become those of whole numbers (float_order.h). What is left to do comes before the
// operation's own `finish`. `rank` is this one: where a reduce leaves no result, nothing is
// written. `on` is where the buffers lie.
Adapted adapt_reduction(fabric::Operation operation, std::shared_ptr<const void> memory, int rank,
                        int group_size, const c10::Device& on);
Adapted adapt_reduction(fabric::Operation operation, std::shared_ptr<const void> memory, int rank,
                        int group_size);

// Whole numbers in a form whose sums over the ranks cannot overflow, and the average from such a
// sum: one division, rounded toward zero, in the dtype asked for. Narrow ones are int64 then; an
// int64 is two of them, one after the other: its upper and its lower half, which are summed apart.
// `numbers` and `sum` have one dimension.
at::Tensor to_summand(const at::Tensor& numbers);
at::Tensor to_average(const at::Tensor& sum, int64_t ranks, DType dtype);

}  // namespace lockstep::comm::detail
