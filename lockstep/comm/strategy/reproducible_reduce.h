// SPDX-License-Identifier: Apache-2.0
// Sums whose bits do not depend on the backend: the fixed binary tree over ranks that thread and
// shm always use. Backends with an order of their own move the blocks (all_to_all, all_gather) and
// leave the arithmetic to us, on the device where they take tensors from there; then it happens in
// wait(), so all ranks wait for several of these in the same order. 16-bit floats travel as such,
// and are summed in float32 and rounded once.
#pragma once

#include "lockstep/comm/collectives.h"

namespace lockstep::comm {

[[nodiscard]] Work all_reduce_ordered(const at::Tensor& tensor, const Group& group,
                                      ReduceOptions options = {});
// As with reduce_scatter, `output` may be this rank's block of `input`.
[[nodiscard]] Work reduce_scatter_ordered(const at::Tensor& output, const at::Tensor& input,
                                          const Group& group, ReduceScatterOptions options = {});

}  // namespace lockstep::comm
