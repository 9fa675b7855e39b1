// SPDX-License-Identifier: Apache-2.0
#include "lockstep/core/error.h"
#include "lockstep/optim/kernels/packed_adamw.h"

namespace lockstep::optim::cuda {

void launch_packed_adamw(const PackedFormat&, const PackedSlice&, const AdamWFactors&, void*) {
  check(false, "this build has no CUDA kernels");
}

void launch_decode(const codec::CodedArray&, int64_t, DType, void*, void*) {
  check(false, "this build has no CUDA kernels");
}

}  // namespace lockstep::optim::cuda
