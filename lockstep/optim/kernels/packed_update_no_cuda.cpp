// SPDX-License-Identifier: Apache-2.0
#include "lockstep/core/error.h"
#include "lockstep/optim/kernels/packed_update.h"

namespace lockstep::optim::cuda {

void launch_packed_update(const PackedFormat&, const PackedSlice&, const PackedFactors&, void*) {
  check(false, "this build has no CUDA kernels");
}

void launch_decode(const codec::CodedArray&, int64_t, DType, void*, void*) {
  check(false, "this build has no CUDA kernels");
}

}  // namespace lockstep::optim::cuda
