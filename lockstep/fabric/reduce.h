// SPDX-License-Identifier: Apache-2.0
// Element-wise reduction of several buffers in a fixed order.
#pragma once

#include <cstddef>
#include <span>

#include "lockstep/core/dtype.h"
#include "lockstep/fabric/operation.h"

namespace lockstep::fabric {

// Writes the reduction of all inputs to every output, `count` elements each. Inputs are combined as
// a binary tree over their positions, ((0 1)(2 3))((4 5)(6 7)), split at the largest power of two:
// the same bits on every rank. An output may be one of the inputs. 16-bit floats are combined
// in float32 and rounded once. avg divides by the number of inputs:
// whole numbers are summed without overflow and the quotient is rounded toward zero.
void reduce(DType dtype, ReduceOp op, std::span<std::byte* const> outputs,
            std::span<const std::byte* const> inputs, size_t count);

// Throws ConfigError for a combination that has no meaning (avg of bool).
void check_reducible(DType dtype, ReduceOp op);

}  // namespace lockstep::fabric
