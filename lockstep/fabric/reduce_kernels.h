// SPDX-License-Identifier: Apache-2.0
// The reduction loops, compiled once for each instruction set that matters (LOCKSTEP_ISA) and
// chosen at run time.
#pragma once

#include <cstddef>

#include "lockstep/core/dtype.h"
#include "lockstep/fabric/operation.h"

namespace lockstep::fabric {

using ReduceKernel = void (*)(std::byte* const* outputs, size_t num_outputs,
                              const std::byte* const* inputs, size_t num_inputs, size_t count);

namespace baseline {
ReduceKernel find_kernel(DType dtype, ReduceOp op);
}
namespace x86_v3 {  // AVX2, FMA, F16C
ReduceKernel find_kernel(DType dtype, ReduceOp op);
}

}  // namespace lockstep::fabric
