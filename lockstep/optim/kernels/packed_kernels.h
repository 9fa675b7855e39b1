// SPDX-License-Identifier: Apache-2.0
// The loops of packed_update.h, compiled once for each instruction set that matters (LOCKSTEP_ISA)
// and chosen at run time; as in kernels.h the bits do not depend on it. Private: not installed.
#pragma once

#include <cstdint>

#include "lockstep/core/dtype.h"
#include "lockstep/optim/kernels/kernels.h"

namespace lockstep::optim::detail {

// What becomes of the one tie in 65537 that the low half of a master does not tell from the other.
enum class Tie {
  none,   // float32: there is no master
  mark,   // it is the sign of exp_avg_sq
  round,  // the master loses the last of its bits
};

struct PackedOperands {
  void* param;
  const void* grad;
  uint16_t* remainder;  // null without a master
  float* exp_avg;
  float* exp_avg_sq;
};

// All for elements [0, count).
using PackedAdamWKernel = void (*)(const PackedOperands&, const AdamWFactors&, int64_t count);
// The master of a parameter of bfloat16. exp_avg_sq is null where no mark is kept.
using JoinKernel = void (*)(const void* param, const uint16_t* remainder, const float* exp_avg_sq,
                            float* master, int64_t count);
// The parameter and the remainder of a master; sets or clears the signs of exp_avg_sq, unless null.
using SplitKernel = void (*)(const float* master, void* param, uint16_t* remainder,
                             float* exp_avg_sq, int64_t count);

struct PackedKernels {
  // Null for types that have no kernel.
  PackedAdamWKernel (*adamw)(DType param, DType grad, Tie tie);
  JoinKernel join;
  SplitKernel split;
};

namespace baseline {
extern const PackedKernels packed_kernels;
}
namespace x86_v3 {  // AVX2, F16C
extern const PackedKernels packed_kernels;
}

// The best that this processor can run.
const PackedKernels& packed_kernels();

}  // namespace lockstep::optim::detail
